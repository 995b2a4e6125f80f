"""The tables of pairs, and a pool that neither hangs nor breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rstar2_megatron.reward.algebra import compare
from rstar2_megatron.reward.comparison import Comparison
from rstar2_megatron.reward.math_grader import CORRECT, WRONG, grade_answer, quick_grade
from rstar2_megatron.reward.pool import Grade, GraderPool
from rstar2_megatron.reward.spelling import spell
from tests.reward.fresh_pairs import FORM_PAIRS, FORM_REFUSED, FRESH_PAIRS, FRESH_REFUSED, REVIEWED_PAIRS
from tests.reward.held_out_pairs import HELD_OUT_PAIRS, LATER_PAIRS
from tests.reward.input_pairs import INPUT_PAIRS
from tests.reward.later_pairs import REFUSED, SPELLED_PAIRS
from tests.reward.notation_pairs import NOTATION_PAIRS
from tests.reward.pairs import flat
from tests.reward.probed_pairs import PROBED_PAIRS, PROBED_REFUSED, RULE_PAIRS


def boxed(answer: str) -> str:
    return f"<reason>thinking</reason> <answer>it is \\boxed{{{answer}}}</answer>"


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(num_workers=2, timeout_s=20.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def strict() -> Iterator[GraderPool]:
    with GraderPool(num_workers=1, timeout_s=2.0) as pool:
        yield pool


def children() -> set[int]:
    """Child processes of every thread of this one."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {int(word) for word in (task / "children").read_text().split()}
    return found


TABLES = {"pairs": flat(), **{kind: flat(rows) for kind, rows in INPUT_PAIRS.items()}, "held out": flat(HELD_OUT_PAIRS)}
TABLES |= {"later": flat(LATER_PAIRS), "spelled": flat(SPELLED_PAIRS), "probed": flat(PROBED_PAIRS)}
TABLES |= {"rules": flat(RULE_PAIRS), "fresh": flat(FRESH_PAIRS), "forms": flat(FORM_PAIRS), "reviewed": flat(REVIEWED_PAIRS)}
TABLES |= {"notations": flat(NOTATION_PAIRS)}


@pytest.fixture(scope="module")
def graded(pool: GraderPool) -> dict[tuple[str, str], str]:
    """(solution, answer) -> detail. Answers with unclosed braces cannot be inside a box: they are graded without a response."""

    async def grade(solution: str, answer: str) -> tuple[tuple[str, str], str]:
        detail = quick_grade(answer, [solution]) or (await pool.grade(boxed(answer), [solution])).detail
        return (solution, answer), detail

    async def grade_all() -> dict[tuple[str, str], str]:
        return dict(await asyncio.gather(*(grade(s, a) for table in TABLES.values() for s, a, _ in table)))

    return asyncio.run(grade_all())


def test_tables_of_pairs(graded: dict[tuple[str, str], str], capsys: pytest.CaptureFixture[str]) -> None:
    """No wrong answer is accepted. Few right ones are refused: none of the first table, which holds what is common."""
    assert len(TABLES["pairs"]) >= 679 and sum(map(len, TABLES.values())) >= 10290
    refused: list[tuple[str, str]] = []
    for kind, table in TABLES.items():
        right = [graded[s, a] == CORRECT for s, a, equal in table if equal]
        accepted = [(s, a) for s, a, equal in table if not equal and graded[s, a] == CORRECT]
        with capsys.disabled():
            recall, precision = sum(right) / len(right), sum(right) / (sum(right) + len(accepted))
            print(f"\n{kind}: {len(table)} pairs, precision {precision:.4f}, recall {recall:.4f}", end="")
        assert not accepted
        refused += [(s, a) for s, a, equal in table if equal and graded[s, a] != CORRECT]
    assert refused == [
        ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "-2"),
        ("x^2<4", "-2<x<2"),
        ("x^2<4", "(-2,2)"),
        *REFUSED,
        *PROBED_REFUSED,
        *FRESH_REFUSED,
        *FORM_REFUSED,
    ]


def test_equality_is_symmetric() -> None:
    """Of any two texts of the tables. Which is the solution counts only where it alone names a percent sign or a base."""

    def equal(a: str, b: str) -> bool:
        return Comparison(compare).same(spell(a), spell(b))

    pairs = [(s, a) for table in TABLES.values() for s, a, _ in table]
    assert [pair for pair in pairs if equal(*pair) != equal(*reversed(pair))] == []
    assert equal("25\\%", "25") is equal("5", "5_7") is False
    assert grade_answer("25", ["25\\%"]) == grade_answer("101", ["101_2"]) == CORRECT
    assert grade_answer("25\\%", ["25"]) == grade_answer("101_2", ["101"]) == WRONG


@pytest.mark.parametrize(
    ("response", "solutions", "reward", "detail"),
    [
        (boxed("42"), ["42"], 1.0, "correct"),
        (boxed("42"), ["7", "42"], 1.0, "correct"),
        (boxed("\\sqrt{8}"), ["1", "2\\sqrt{2}"], 1.0, "correct"),
        (boxed("41"), ["42"], 0.0, "wrong"),
        ("\\boxed{42}", ["42"], 0.0, "no_answer_tag"),
        ("<answer>42</answer>", ["42"], 0.0, "no_box"),
        (boxed("x" * 100_000), ["42"], 0.0, "ungradable"),
        (boxed("1" * 100_000), ["1" * 99_999], 0.0, "ungradable"),
    ],
)
async def test_details_are_typed(pool: GraderPool, response, solutions, reward, detail) -> None:
    grade = await pool.grade(response, solutions)
    assert (grade.reward, grade.detail) == (reward, detail)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "(x+1)^{100000}",
        "\\sqrt{" * 300 + "2" + "}" * 300,
        "\\frac{" * 200 + "1" + "}{2}" * 200,
        "__import__('os').system('touch rstar2_pwned')",
        "x.__class__.__mro__",
        "100000!!",
    ],
)
async def test_bombs_end_in_time_and_the_pool_goes_on(strict: GraderPool, answer: str) -> None:
    grade = await asyncio.wait_for(strict.grade(boxed(answer), ["x+1"]), 120)
    assert grade.reward == 0.0 and grade.detail in ("wrong", "ungradable", "grader_timeout")
    assert (await strict.grade(boxed("1+x"), ["x+1"])).detail == "correct"
    assert not os.path.exists("rstar2_pwned")


@pytest.mark.parametrize("piece", ["\\boxed{", "<answer>\\boxed{", "{", "answer is ", "<answer>", "\\frac{1}{"])
async def test_endless_responses_are_read_at_once(pool: GraderPool, piece: str) -> None:
    """What is read in the caller's own process must take linear time: it cannot be killed there."""
    text = piece * (200_000 // len(piece))
    begun = time.process_time()
    grade = await pool.grade(f"{text}<answer>\\boxed{{42}}</answer>", ["42"])
    assert grade.detail == "correct" and time.process_time() - begun < 2.0


async def test_a_worker_that_takes_too_long_is_replaced() -> None:
    before = children()
    with GraderPool(num_workers=1, timeout_s=2.0) as pool:
        assert (await pool.grade(boxed("9^{9^{9^{9}}}"), ["x+1"])).detail == "grader_timeout"
        assert children() - before == set()
        assert (await pool.grade(boxed("a+b"), ["b+a"])).reward == 1.0


async def test_a_killed_worker_is_replaced() -> None:
    before = children()
    with GraderPool(num_workers=1, timeout_s=30.0) as pool:
        assert (await pool.grade(boxed("a+b"), ["b+a"])).reward == 1.0
        (worker,) = children() - before
        os.kill(worker, signal.SIGKILL)
        grades = [await pool.grade(boxed(f"a+{i}b"), [f"{i}b+a"]) for i in (2, 3)]
        assert [g.reward for g in grades] == [1.0, 1.0]
    assert children() - before == set()


def test_works_in_any_thread_and_event_loop() -> None:
    grades: list[Grade] = []
    with GraderPool(num_workers=1, timeout_s=30.0) as pool:

        def in_thread(i: int) -> None:
            grades.append(asyncio.run(pool.grade(boxed(f"y^2+{i}"), [f"{i}+y^2"])))

        threads = [threading.Thread(target=in_thread, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        grades.append(pool.grade_now(boxed("z+z"), ["2z"]))
    assert [g.reward for g in grades] == [1.0] * 4


def test_plain_numbers_start_no_process() -> None:
    before = children()
    with GraderPool() as pool:
        assert pool.grade_now(boxed("12"), ["12"]).reward == 1.0
        assert children() == before


def test_a_closed_pool() -> None:
    pool = GraderPool()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade_now(boxed("1"), ["1"])
