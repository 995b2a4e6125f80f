"""Whole trajectories with nothing stood in: SGLang, the agent loop, the Code Judge with its Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from rstar2_megatron.judge.client import JudgeClient
from rstar2_megatron.judge.service import JudgeService
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine import EngineClient
from rstar2_megatron.rollout.group_runner import run_groups
from rstar2_megatron.rollout.kv_budget import make_budget
from rstar2_megatron.settings.schema import RolloutModelSettings, RolloutSettings, SamplingParams
from rstar2_megatron.trajectory import FinishReason, Problem, ToolOutcome
from tests.rollout.memorised import ANSWER, CONVERSATIONS, SETTINGS, problem

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def judge_service():
    service = JudgeService(workers=1, time_limit_s=1.0)
    service.start()
    yield service
    service.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loop(memorised_model: Path, judge_service: JudgeService):
    directory = memorised_model
    engine = EngineClient(
        RolloutSettings(
            model=RolloutModelSettings(model_path=str(directory), precision="fp32"),
            max_total_tokens=4096,
            max_running_requests=8,
            max_engine_restarts=1,
        )
    )
    await engine.start()
    judge = JudgeClient(judge_service.url, time_limit_s=1.0, request_timeout_s=60, max_outage_s=120)
    template = ChatTemplate(AutoTokenizer.from_pretrained(directory), SETTINGS)
    yield AgentLoop(
        engine,
        judge,
        template,
        SETTINGS,
        SamplingParams(max_new_tokens=400, temperature=0.0),
        max_context_tokens=1000,
        timeout_s=240,
    )
    await engine.close()
    await judge.close()


async def roll_out(loop: AgentLoop, names: list[str], group_size: int):
    iterator = iter(names)

    async def next_problem() -> Problem | None:
        name = next(iterator, None)
        return None if name is None else problem(name)

    assert isinstance(loop.engine, EngineClient)
    budget = make_budget("kv_adaptive", loop.engine.kv_capacity_tokens, 8)
    groups = {
        g.problem.query_id: g async for g in run_groups(next_problem, loop, budget, group_size=group_size)
    }
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
    segments = loop.template.conversation(
        problem("right"), right.assistant_texts, [[right.tool_calls[0].response_text]]
    )
    whole = loop.template.tokenizer.encode("".join(text for text, _ in segments), add_special_tokens=False)
    assert right.prompt_ids + right.response_ids == whole


async def test_engine_killed_in_mid_rollout_loses_nothing(loop: AgentLoop) -> None:
    engine = loop.engine
    assert isinstance(engine, EngineClient)

    async def kill_soon() -> None:
        while (
            loop.stats.tool_seconds == seconds_before
        ):  # until a tool has run: some turns are done, some not
            await asyncio.sleep(0.01)
        psutil.Process(engine.pid).kill()

    seconds_before = loop.stats.tool_seconds
    killer = asyncio.create_task(kill_soon())
    groups = await roll_out(loop, ["right"], group_size=16)
    await killer
    assert [t.finish_reason for t in groups["right"].trajectories] == [FinishReason.ANSWERED] * 16
    assert loop.stats.engine_retries > 0 and engine.restarts == 1
