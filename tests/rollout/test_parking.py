"""A trajectory that is parked or preempted at any point continues with the same tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rstar2_megatron.rollout.agent_loop import Preemption
from rstar2_megatron.tools import JUPYTER
from rstar2_megatron.trajectory import FinishReason, Trajectory
from tests.rollout.written import (
    ANSWER,
    CELL,
    PROBLEM,
    InterruptedEngine,
    ParkableEngine,
    WrittenEngine,
    WrittenJudge,
    assert_same_tokens,
    call,
    make_loop,
    run,
    written,
)


async def until_in(stage: str, engine: WrittenEngine, judge: WrittenJudge) -> None:
    """Until the trajectory waits for its first turn, its tool call or its second turn, which does not end by itself."""

    async def until(what: list[Any], count: int) -> None:
        async with asyncio.timeout(60):
            while len(what) < count:
                await asyncio.sleep(0)

    if stage == "first turn":
        engine.go.clear()
        await until(engine.seen, 1)
        return
    judge.go.clear()
    await until(judge.codes, 1)
    if stage == "second turn":
        engine.go.clear()
        judge.go.set()
        await until(engine.seen, 2)


async def test_a_trajectory_that_waits_for_an_engine_is_parked(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    written(loop).change_over.clear()
    running = asyncio.create_task(loop.run(PROBLEM, 0))
    await written(loop).waited.wait()
    loop.parking = True
    written(loop).change_over.set()
    assert (await asyncio.wait_for(running, 60)).finish_reason is None and not written(loop).seen


@pytest.mark.parametrize("parked_in", ["first turn", "tool call", "second turn"])
async def test_parked_anywhere_and_resumed_gives_the_same_tokens(tokenizer, parked_in: str) -> None:
    expected, _ = await run(tokenizer, [call(), ANSWER])
    loop = make_loop(tokenizer, [call(), ANSWER])
    engine, judge = ParkableEngine(tokenizer, [call(), ANSWER]), WrittenJudge()
    loop.engine, loop.tools.judge = engine, judge
    task = asyncio.create_task(loop.run(PROBLEM, 0))
    await until_in(parked_in, engine, judge)
    loop.parking = True
    engine.abort_all()
    judge.go.set()
    parked = await task
    parked.check()
    assert parked.finish_reason is None and not parked.usable and len(judge.codes) == (parked_in != "first turn")
    assert loop.stats.parked == 1 and not loop.stats.endings

    engine.aborting.clear()
    engine.go.set()
    later = make_loop(tokenizer, [ANSWER])
    later.engine = engine
    done = await later.run(PROBLEM, 0, resume=parked)
    done.check()
    assert done.finish_reason is FinishReason.ANSWERED and done.open_turn is None
    assert_same_tokens(done, expected)
    assert done.assistant_texts == expected.assistant_texts and len(done.tool_calls) == 1
    covered = [i for span in done.version_spans for i in range(span.start, span.end)]
    assert covered == [i for i, kept in enumerate(done.loss_mask) if kept]


@pytest.mark.parametrize("preempted_in", ["first turn", "tool call", "second turn"])
async def test_preempted_anywhere_and_resumed_gives_the_same_tokens(tokenizer, preempted_in: str) -> None:
    expected, _ = await run(tokenizer, [CELL, ANSWER], tools=[JUPYTER])
    loop = make_loop(tokenizer, [CELL, ANSWER], tools=[JUPYTER])
    engine, judge = ParkableEngine(tokenizer, [CELL, ANSWER]), WrittenJudge()
    loop.engine, loop.tools.judge = engine, judge
    preemption = Preemption()
    task = asyncio.create_task(loop.run(PROBLEM, 0, preemption=preemption))
    await until_in(preempted_in, engine, judge)
    loop.preempt(preemption)
    judge.go.set()
    parked = await task
    parked.check()
    assert parked.finish_reason is None and loop.stats.preemptions == 1
    assert loop.stats.parked == 0 and loop.stats.trajectories == 0 and not loop.stats.endings
    assert not judge.closed and bool(parked.session) == (preempted_in != "first turn")

    engine.go.set()
    done = await loop.run(PROBLEM, 0, resume=parked)
    done.check()
    assert done.finish_reason is FinishReason.ANSWERED and done.open_turn is None
    assert_same_tokens(done, expected)
    assert done.assistant_texts == expected.assistant_texts and len(judge.codes) == 1
    assert len(judge.closed) == 1 and loop.stats.endings == {"answered": 1}


async def test_a_turn_that_new_weights_interrupt_goes_on_from_its_tokens(tokenizer) -> None:
    """Three times in one turn; once right after its last token, which SGLang then does not report as the end."""
    expected, _ = await run(tokenizer, [call(), ANSWER])
    loop = make_loop(tokenizer, [call(), ANSWER])
    engine = InterruptedEngine(tokenizer, [call(), ANSWER], cuts=[3, 0, 5], version=7)
    loop.engine = engine
    done = await loop.run(PROBLEM, 0)
    done.check()
    assert done.finish_reason is FinishReason.ANSWERED and not engine.cuts
    assert_same_tokens(done, expected)
    assert done.assistant_texts == expected.assistant_texts
    assert [span.version for span in done.version_spans[:3]] == [7, 9, 10]  # nothing was generated under version 8
    covered = [i for span in done.version_spans for i in range(span.start, span.end)]
    assert covered == [i for i, kept in enumerate(done.loss_mask) if kept]

    whole = len(tokenizer.encode(call() + "<|im_end|>", add_special_tokens=False))
    engine = InterruptedEngine(tokenizer, [call(), ANSWER], cuts=[whole], version=7)
    loop = make_loop(tokenizer, [call(), ANSWER])
    loop.engine = engine
    assert_same_tokens(await loop.run(PROBLEM, 0), expected)


async def test_new_weights_right_after_a_trajectory_has_come_through_ray_cost_it_nothing(tokenizer) -> None:
    """What Ray hands on is read-only, and the engine may answer without a token."""
    expected, _ = await run(tokenizer, [call(), ANSWER])
    loop = make_loop(tokenizer, [call(), ANSWER])
    loop.engine = engine = ParkableEngine(tokenizer, [call(), ANSWER])
    preemption = Preemption()
    task = asyncio.create_task(loop.run(PROBLEM, 0, preemption=preemption))
    await until_in("first turn", engine, WrittenJudge())
    loop.preempt(preemption)
    parked = await task
    assert len(parked.response_ids)
    for name in Trajectory.ARRAYS:
        getattr(parked, name).flags.writeable = False
    loop.engine = engine = InterruptedEngine(tokenizer, engine.turns, cuts=[0, 2], version=7)
    done = await loop.run(PROBLEM, 0, resume=parked)
    assert done.finish_reason is FinishReason.ANSWERED and not engine.cuts
    assert_same_tokens(done, expected)


async def test_new_weights_after_the_last_token_of_the_budget_end_the_trajectory(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER], max_new_tokens=4)
    loop.engine = InterruptedEngine(tokenizer, [ANSWER], cuts=[4], version=1)
    done = await loop.run(PROBLEM, 0)
    assert done.finish_reason is FinishReason.LENGTH_LIMIT and len(done.response_ids) == 4


async def test_repetition_is_counted_across_a_preemption(tokenizer) -> None:
    turns = [call("b"), call("b"), call("b"), ANSWER]
    loop = make_loop(tokenizer, turns, max_assistant_turns=9, max_identical_calls=3)
    loop.engine, judge = ParkableEngine(tokenizer, turns), WrittenJudge()
    loop.tools.judge = judge
    preemption = Preemption()
    task = asyncio.create_task(loop.run(PROBLEM, 0, preemption=preemption))
    await until_in("tool call", loop.engine, judge)
    preemption.asked = True
    judge.go.set()
    parked = await task
    assert parked.finish_reason is None and parked.num_turns == 1
    done = await loop.run(PROBLEM, 0, resume=parked)
    assert done.finish_reason is FinishReason.REPEATED_CALL and done.num_turns == 3


async def test_a_cut_trajectory_is_counted_and_its_session_closed(tokenizer) -> None:
    judge = WrittenJudge()
    loop = make_loop(tokenizer, [CELL, ANSWER], judge, tools=[JUPYTER])
    task = asyncio.create_task(loop.run(PROBLEM, 0))
    await until_in("tool call", written(loop), judge)
    loop.parking = loop.cutting = True
    judge.go.set()
    trajectory = await task
    assert trajectory.finish_reason is FinishReason.CUT and not trajectory.usable
    assert len(judge.closed) == 1 and loop.stats.endings == {"cut": 1}
