"""Builds the agent loop of one engine from settings, for training and evaluation."""

from __future__ import annotations

from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.tool import Judge
from rstar2_megatron.settings.schema import RolloutSettings, SamplingParams


def make_agent_loop(
    engine: EngineClient,
    judge: Judge,
    template: ChatTemplate,
    spec: RolloutSpec,
    rollout: RolloutSettings,
    max_context_tokens: int,
) -> AgentLoop:
    """Agent loop of one engine. `max_context_tokens` bounds prompt and response together."""
    return AgentLoop(
        engine,
        judge,
        template,
        template.settings.model_copy(update={"max_assistant_turns": spec.max_assistant_turns}),
        SamplingParams(temperature=spec.temperature, top_p=spec.top_p, top_k=spec.top_k, max_new_tokens=spec.max_new_tokens),
        max_context_tokens=max_context_tokens,
        timeout_s=rollout.trajectory_timeout_s,
        seed=spec.seed,
    )
