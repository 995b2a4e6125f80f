"""Whole trajectories with every part real: SGLang, the agent loop, the Code Judge with its Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.rollout.group_runner import run_groups
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.rollout.agent_loop import AgentLoop, Preemption
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.scheduling.adaptive_budget import make_budget
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.settings.schema import SamplingParams
from rstar2_megatron.tools import JUPYTER
from rstar2_megatron.trajectory import FinishReason, Problem, ToolOutcome, Trajectory
from tests.rollout.engine.small import update_weights
from tests.rollout.memorised import ANSWER, CONVERSATIONS, SETTINGS, problem
from tests.rollout.written import ParkableEngine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(loop_scope="session")
async def loop(engine: EngineClient, judge_service: JudgeService) -> AsyncIterator[AgentLoop]:
    template = ChatTemplate(AutoTokenizer.from_pretrained(engine.settings.model.model_path), SETTINGS)
    sampling = SamplingParams(max_new_tokens=400, temperature=0.0)
    async with JudgeClient(judge_service.url, time_limit_s=1.0, request_timeout_s=60, max_outage_s=120) as judge:
        yield AgentLoop(engine, judge, template, SETTINGS, sampling, max_context_tokens=1000, timeout_s=240)


async def roll_out(loop: AgentLoop, names: list[str], group_size: int):
    iterator = iter(names)

    async def next_problem() -> Problem | None:
        name = next(iterator, None)
        return None if name is None else problem(name)

    budget = make_budget("kv_adaptive", 4096, 8)
    groups = {g.problem.query_id: g async for g in run_groups(next_problem, loop, budget, group_size=group_size)}
    assert budget.reserved_tokens == 0
    return groups


async def test_tools_run_and_their_outcomes_are_typed(loop: AgentLoop) -> None:
    groups = await roll_out(loop, list(CONVERSATIONS), group_size=2)
    expected = {"right": ToolOutcome.OK, "loop": ToolOutcome.TIMEOUT, "broken": ToolOutcome.MALFORMED}
    for name, outcome in expected.items():
        for trajectory in groups[name].trajectories:
            trajectory.check()
            assert [call.outcome for call in trajectory.tool_calls] == [outcome], trajectory.tool_calls
            assert trajectory.assistant_texts[0] == CONVERSATIONS[name][0]
            assert trajectory.finish_reason is FinishReason.ANSWERED
    (right, _) = groups["right"].trajectories
    assert right.assistant_texts[1] == ANSWER
    # trained on exactly what a fresh render of the conversation gives
    segments = loop.template.conversation(problem("right"), right.assistant_texts, [[right.tool_calls[0].response_text]])
    whole = loop.template.tokenizer.encode("".join(text for text, _ in segments), add_special_tokens=False)
    assert [*right.prompt_ids, *right.response_ids] == whole


async def test_weights_change_while_tools_run(loop: AgentLoop, engine: EngineClient, memorised_model: Path) -> None:
    """The tool takes its second; the sync does not wait for it, and each token says which weights made it."""
    weights, version = load_file(memorised_model / "model.safetensors"), engine.weight_version

    async def sync_in_the_tool_wait() -> None:
        while engine.num_waiting_calls == 0:  # until the first turns run
            await asyncio.sleep(0.01)
        while engine.num_waiting_calls:  # until all are at their tools
            await asyncio.sleep(0.01)
        await update_weights(engine, weights.items(), version + 7)

    syncing = asyncio.create_task(sync_in_the_tool_wait())
    groups = await roll_out(loop, ["loop"], group_size=4)
    await asyncio.wait_for(syncing, 60)
    for trajectory in groups["loop"].trajectories:
        trajectory.check()
        assert trajectory.finish_reason is FinishReason.ANSWERED
        assert [call.outcome for call in trajectory.tool_calls] == [ToolOutcome.TIMEOUT]
        assert [span.version for span in trajectory.version_spans] == [version, version + 7]
        covered = sum(span.end - span.start for span in trajectory.version_spans)
        assert covered == trajectory.num_trained_tokens


async def test_parked_in_mid_rollout_and_carried_over(loop: AgentLoop, engine: EngineClient) -> None:
    """A phase ends while turns are generated; the next one finishes every trajectory, token-exact."""
    work = [Slice(0, problem("right"), list(range(4))), Slice(1, problem("loop"), list(range(4)))]
    back: dict[tuple[int, int], Trajectory] = {}

    async def phase(slices: list[Slice], park: bool) -> None:
        given = iter([slices, None])
        budget = make_budget("kv_adaptive", 4096, 8)

        async def next_work(room: int) -> list[Slice] | None:
            return next(given)

        async def ended(one: Slice, trajectory: Trajectory) -> None:
            back[one.group, trajectory.rollout_index] = trajectory

        runner = TrajectoryRunner(loop, AdmissionQueue(budget), next_work, ended)
        running = asyncio.create_task(runner.run())
        if park:
            while not engine.num_waiting_calls:  # until the first turns run
                await asyncio.sleep(0)
            await runner.park(cut=False)
        await asyncio.wait_for(running, 60)
        assert budget.running == 0 and budget.reserved_tokens == 0

    await phase(work, park=True)
    parked = {key: t for key, t in back.items() if t.finish_reason is None}
    assert parked
    loop.parking = False
    rest = []
    for one in work:
        again = {i: parked[one.group, i] for i in one.indices if (one.group, i) in parked}
        missing = [i for i in one.indices if (one.group, i) not in back]
        rest.append(Slice(one.group, one.problem, [*again, *missing], again))
    await phase(rest, park=False)
    assert len(back) == 8 and all(t.finish_reason is FinishReason.ANSWERED for t in back.values())
    for t in back.values():
        t.check()
        responses = [[call.response_text] for call in t.tool_calls]
        segments = loop.template.conversation(problem(t.query_id), t.assistant_texts, responses)
        text = "".join(text for text, _ in segments)
        assert [*t.prompt_ids, *t.response_ids] == loop.template.tokenizer.encode(text, add_special_tokens=False)


async def test_cells_share_a_live_interpreter_across_a_preemption(loop: AgentLoop, judge_service: JudgeService) -> None:
    """The judge's own session: what one cell defines the next one sees, also when the trajectory is parked between."""

    def cell(code: str) -> str:
        body = json.dumps({"name": JUPYTER, "arguments": {"code": code}})
        return f"x</reason><tool_call>{body}</tool_call>"

    turns = [cell("x = 41"), cell("print(x + 1)"), cell("x / 0"), cell("x"), ANSWER]
    settings = SETTINGS.model_copy(update={"tools": [JUPYTER], "max_assistant_turns": 9})
    template = ChatTemplate(loop.template.tokenizer, settings)
    engine = ParkableEngine(template.tokenizer, list(turns))
    async with JudgeClient(judge_service.url, time_limit_s=1.0, request_timeout_s=60) as judge:
        cells = AgentLoop(
            engine, judge, template, settings, SamplingParams(max_new_tokens=900), max_context_tokens=2000, timeout_s=120
        )
        preemption = Preemption()
        task = asyncio.create_task(cells.run(problem("right"), 0, preemption=preemption))
        while len(engine.turns) == len(turns):  # until the first turn has ended
            await asyncio.sleep(0)
        engine.go.clear()
        while len(engine.seen) < 2:  # until the first cell has run
            await asyncio.sleep(0.01)
        cells.preempt(preemption)
        engine.go.set()
        parked = await asyncio.wait_for(task, 60)
        assert parked.finish_reason is None and parked.session and len(parked.tool_calls) == 1
        done = await asyncio.wait_for(cells.run(problem("right"), 0, resume=parked), 60)
    done.check()
    assert done.finish_reason is FinishReason.ANSWERED and done.session == ""
    assert [str(call.outcome) for call in done.tool_calls] == ["ok", "ok", "error", "ok"]
    texts = [call.response_text for call in done.tool_calls]
    assert "42" in texts[1] and "ZeroDivisionError" in texts[2] and "41" in texts[3]
    assert done.assistant_texts == turns


@pytest.mark.ci
async def test_engine_killed_in_mid_rollout_loses_nothing(loop: AgentLoop, engine: EngineClient) -> None:
    restarts = engine.restarts

    async def kill_soon() -> None:
        while loop.stats.tool_seconds == 0:  # until a tool has run: some turns are done, some not
            await asyncio.sleep(0.01)
        psutil.Process(engine.pid).kill()

    killer = asyncio.create_task(kill_soon())
    groups = await roll_out(loop, ["right"], group_size=16)
    await killer
    assert [t.finish_reason for t in groups["right"].trajectories] == [FinishReason.ANSWERED] * 16
    assert loop.stats.engine_retries > 0 and engine.restarts == restarts + 1
