"""The table of pairs, and a pool of workers that neither hangs nor breaks."""

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

from rstar2_megatron.reward.math_grader import CORRECT, UNGRADABLE, grade_answer, quick_grade
from rstar2_megatron.reward.pool import Grade, GraderPool
from tests.reward.pairs import flat


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


def graded(answer: str, solution: str) -> str:
    """As a worker grades."""
    try:
        return grade_answer(answer, [solution])
    except Exception:  # parsers raise anything on hostile text
        return UNGRADABLE


def test_table_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """All in this process; what the pool decides without a worker, it decides alike."""
    pairs = flat()
    assert len(pairs) >= 679
    details = [graded(answer, solution) for solution, answer, _ in pairs]
    for detail, (solution, answer, _) in zip(details, pairs):
        assert quick_grade(answer, [solution]) in (None, detail), (solution, answer)
    got = [detail == CORRECT for detail in details]
    true_positive = sum(g and v for g, (_, _, v) in zip(got, pairs))
    false = [(s, a, "accepted" if g else "refused") for g, (s, a, v) in zip(got, pairs) if g != v]
    precision, recall = true_positive / sum(got), true_positive / sum(v for _, _, v in pairs)
    with capsys.disabled():
        print(f"\ngrading table: {len(pairs)} pairs, precision {precision:.4f}, recall {recall:.4f}")
    assert not false


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


def test_a_closed_pool_and_bad_arguments() -> None:
    pool = GraderPool()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.grade_now(boxed("1"), ["1"])
    with pytest.raises(ValueError, match="num_workers=0"):
        GraderPool(0)
