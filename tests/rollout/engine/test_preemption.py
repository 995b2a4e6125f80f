"""Preemption with the real engine and a cache far too small for what was admitted: token-exact, and everything ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.scheduling.adaptive_budget import AdaptiveBudget
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.trajectory import Problem, Trajectory
from tests.rollout.engine.small import hf_logprobs, settings_for
from tests.rollout.written import WrittenJudge

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]
_KV_TOKENS = 1024
_RESPONSE = 700


async def test_the_real_engine_goes_on_from_the_same_tokens(tiny_model: Path) -> None:
    settings = AgentLoopSettings(system_prompt="", user_prefix="", max_assistant_turns=1, tools=[])
    template = ChatTemplate(AutoTokenizer.from_pretrained(tiny_model), settings)
    engine = EngineClient(settings_for(tiny_model, max_total_tokens=_KV_TOKENS), seed=3)
    await engine.start()
    loop = AgentLoop(
        engine,
        WrittenJudge(),
        template,
        settings,
        SamplingParams(max_new_tokens=_RESPONSE),
        max_context_tokens=1000,
        timeout_s=300,
    )
    assert engine.kv_capacity_tokens == _KV_TOKENS
    budget = AdaptiveBudget(engine.kv_capacity_tokens, 16)
    for key in range(600):  # it has learnt that trajectories are short, which these are not
        budget.try_admit(key, "short", 10, 10 + _RESPONSE)
        budget.set_length(key, 20)
        budget.release(key)
    budget.observe(0, {})
    problems: list[Problem] = []
    back: list[Trajectory] = []

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        back.append(trajectory)

    async def roll_out(group: int) -> None:
        more = [Problem(f"q{i}", [{"role": "user", "content": f"{i}?"}], ["1"]) for i in (group, group + 1)]
        problems.extend(more)
        given: Any = iter([[Slice(i, problem, list(range(8))) for i, problem in enumerate(more, group)], None])

        async def next_work(room: int) -> list[Slice] | None:
            return next(given)

        runner = TrajectoryRunner(loop, AdmissionQueue(budget), next_work, ended)
        engine.on_report = runner.observe
        await asyncio.wait_for(runner.run(), 300)

    try:
        while not loop.stats.preemptions and len(problems) < 60:
            await roll_out(len(problems))  # on a busy machine the engine may help itself before its report is read
    finally:
        await engine.close()
    assert budget.running == 0 and budget.reserved_tokens == budget.used_tokens == 0
    assert loop.stats.preemptions > 0 and loop.stats.parked == 0
    assert loop.stats.sums()["preemptions"] == loop.stats.preemptions
    assert {(t.query_id, t.rollout_index) for t in back} == {(p.query_id, i) for p in problems for i in range(8)}
    assert all(t.usable for t in back), [t.error for t in back]
    assert loop.stats.trajectories == len(back) == 8 * len(problems)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for trajectory in back:
        trajectory.check()
        covered = [i for span in trajectory.version_spans for i in range(span.start, span.end)]
        assert covered == list(range(len(trajectory.response_ids)))
        expected = hf_logprobs(model, trajectory.prompt_ids.tolist(), trajectory.response_ids.tolist())
        assert torch.allclose(expected, torch.tensor(trajectory.rollout_logprobs), atol=1e-3)
