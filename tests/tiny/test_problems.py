from __future__ import annotations

import itertools
import random

import pytest

from rstar2_megatron.tiny.problems import CHAINED, FAMILIES, MISTAKEN, SIZES, TinyProblem, chain_code, mistaken, stream
from rstar2_megatron.tiny.sft import run_trusted


def take(level: str, seed: int, count: int, seen: set[str] | None = None) -> list[TinyProblem]:
    questions = set() if seen is None else seen
    return list(itertools.islice(stream(level, random.Random(seed), questions), count))  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["easy", "main"])
@pytest.mark.parametrize("family", FAMILIES | CHAINED)
def test_code_does_what_its_name_says(family: str, level: str) -> None:
    rng = random.Random(f"{family} {level}")
    for _ in range(40):
        problem = (FAMILIES | CHAINED)[family](rng, SIZES[level])  # type: ignore[index]
        assert run_trusted(problem.right_code, 0.0).stdout == f"{problem.answer}\n"
        wrong = run_trusted(problem.wrong_code, 0.0)
        assert wrong.success and wrong.stdout.strip() != problem.answer
        for code in problem.error_codes:
            assert not run_trusted(code, 0.0).success


def test_families_take_turns_and_questions_do_not_repeat() -> None:
    problems = take("main", 0, 20 * len(FAMILIES))
    assert [p.family for p in problems] == list(FAMILIES) * 20
    assert len({p.question for p in problems}) == len(problems)


def test_every_step_of_a_chain_decides_the_answer() -> None:
    rng = random.Random(0)
    for _ in range(40):
        problem = CHAINED["chain"](rng, SIZES["main"])
        for wrong in range(4):  # 0: none
            value = problem.chain[0]
            for place, operation in enumerate(problem.chain[1:], 1):
                step = mistaken(operation) if place == wrong else operation
                value = run_trusted(chain_code(place, value, step), 0.0).stdout.strip()
            assert (value == problem.answer) == (wrong == 0)


def test_one_order_puts_every_operator_before_its_mistake() -> None:
    """Otherwise a preference model would have to read the question to rank a step and its mistake."""
    for operator in MISTAKEN:
        followers = [operator]
        while (mistake := MISTAKEN.get(followers[-1])) is not None:
            assert mistake not in followers
            followers.append(mistake)


def test_a_stream_is_decided_by_its_seed() -> None:
    assert take("main", 3, 50) == take("main", 3, 50)
    assert take("main", 3, 50) != take("main", 4, 50)


def test_seen_questions_are_left_out() -> None:
    first = {p.question for p in take("easy", 0, 90)}
    again = take("easy", 0, 90, seen=set(first))
    assert first.isdisjoint(p.question for p in again)


def test_used_up_questions_are_an_error_that_names_the_family() -> None:
    with pytest.raises(ValueError, match=r"no unseen '.*' problem left at level 'easy'"):
        take("easy", 0, 100_000)


def test_row_has_the_schema_of_the_data_files() -> None:
    problem = take("main", 0, 1)[0]
    assert problem.row("q7") == {
        "prompt": [{"role": "user", "content": problem.question}],
        "solutions": [problem.answer],
        "query_id": "q7",
        "task": "math",
    }
