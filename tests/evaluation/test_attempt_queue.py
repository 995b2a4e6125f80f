"""Which attempts engines get, and what becomes of those that the infrastructure spoils. Pure, no engine."""

from __future__ import annotations

import asyncio

import pytest

from rstar2_megatron.evaluation.attempt_queue import MAX_TRIES, AttemptQueue, run_together
from tests.evaluation.rows import problem


def attempts(per_problem: int, slice_size: int) -> AttemptQueue:
    problems = [problem("a"), problem("b")]
    return AttemptQueue(problems, [(g, i) for g in range(len(problems)) for i in range(per_problem)], slice_size)


async def test_a_slice_holds_attempts_at_one_problem() -> None:
    queue = attempts(3, 2)
    taken = [await queue.next(99) for _ in range(4)]
    assert [(s[0].group, s[0].problem.query_id, s[0].indices) for s in taken if s] == [
        (0, "a", [0, 1]),
        (0, "a", [2]),
        (1, "b", [0, 1]),
        (1, "b", [2]),
    ]


async def test_spoiled_attempts_come_back_to_whichever_engine_waits() -> None:
    queue = attempts(1, 8)
    first, second = await queue.next(1), await queue.next(1)
    assert first and second
    waiting = asyncio.create_task(queue.next(1))  # another engine has nothing to do yet
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.ended(0, 0, usable=False)
    again = await asyncio.wait_for(waiting, 5)
    assert again and again[0].problem.query_id == "a" and again[0].indices == [0]
    queue.ended(1, 0, usable=True)
    idle = asyncio.create_task(queue.next(1))
    await asyncio.sleep(0)
    assert not idle.done()  # the one that came back is under way
    queue.ended(0, 0, usable=True)
    assert await asyncio.wait_for(idle, 5) is None


async def test_an_attempt_is_given_up_after_so_many_tries() -> None:
    queue = attempts(1, 8)
    tries = 0
    while (work := await asyncio.wait_for(queue.next(1), 5)) is not None:
        (slice_,) = work
        tries += slice_.group == 0
        queue.ended(slice_.group, 0, usable=slice_.group == 1)
    assert tries == MAX_TRIES


async def test_the_first_failure_ends_all_engines_and_is_raised_as_it_is() -> None:
    ended = []

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise RuntimeError("lost")

    async def serves() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match=r"^lost$"):
        await asyncio.wait_for(run_together([serves(), fails(), serves()]), 10)
    assert len(ended) == 2
