"""Section `rollout`: engines and their scheduling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rstar2_megatron.settings.sections.base import Section

CONTEXT_SLACK = 8
"""Positions of the context that SGLang keeps for itself."""


class RolloutModelSettings(Section):
    model_path: str
    """Hugging Face directory: weights, config and tokenizer."""
    model_type: str = "qwen2.5"
    precision: Literal["fp32", "bf16"] = "bf16"


class SGLangSettings(Section):
    attention_backend: str = "auto"
    """auto: torch_native on CPU, SGLang's own choice on a GPU."""
    server_args: dict[str, Any] = {}
    """Further fields of sglang.ServerArgs."""


class RolloutSettings(Section):
    group_name: str = "RolloutGroup"
    rollout_backend: Literal["sglang"] = "sglang"
    model: RolloutModelSettings
    sglang: SGLangSettings = SGLangSettings()
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """Share of a GPU's memory for an engine's weights and KV cache: SGLang's mem_fraction_static."""
    tensor_parallel_size: int = Field(1, ge=1)
    pipeline_parallel_size: Literal[1] = 1
    max_running_requests: int = Field(64, ge=1)
    """Requests that an engine computes at the same time."""
    max_total_tokens: int | None = None
    """KV cache in tokens; null lets SGLang derive it from memory (set it on CPU)."""
    trajectory_timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one trajectory, all turns and tool calls included."""
    engine_start_timeout_s: float = Field(1800.0, gt=0)
    """On a GPU the first start compiles kernels and captures CUDA graphs, which takes many minutes."""
    no_progress_timeout_s: float = Field(120.0, gt=0)
    """Seconds after which an engine with queued work and no new token counts as lost."""
    max_engine_restarts: int = Field(2, ge=0)
    max_dropped_share: float = Field(0.25, ge=0, le=1)
    """A step that lost more of its trajectories to engine, judge, deadlines or own code ends the run before it trains."""
    cpu_threads: int = Field(1, ge=1)
    """OMP threads of an engine that runs on CPU."""
    scheduler: Literal["static", "least_requests", "kv_reserve", "kv_adaptive"] = "kv_adaptive"
    """static: a fixed share of the problems per engine. least_requests: the engine with the fewest requests.
    kv_reserve: trajectories that surely fit the engine's KV cache (the paper). kv_adaptive: trajectories that very
    probably fit, longest first.
    """
    request_seeds: bool = False
    """Every request samples by a seed of its own, made of actor.seed, step, problem, rollout and turn, so that its draws do
    not depend on what runs beside it. SGLang then uses kernels whose results do not depend on the batch, which are slower.
    """
    slice_size: int = Field(8, ge=1)
    """Rollouts of one problem that an engine takes at a time; they share its prompt in the prefix cache."""
    tail: Literal["wait", "cut", "carry"] = "wait"
    """The last trajectories of a step: wait for all; cut those that would not change the kept ones; or carry them
    over to the next step, where they continue.
    """
    cut_share: float = Field(0.0, ge=0, le=1)
    """tail=cut: how much of a group's kept trajectories (positives against negatives) the cut may change."""
    carry_share: float = Field(0.1, ge=0, lt=1)
    """tail=carry: groups of a step, as a share, that may be unfinished when it ends."""
    max_carry_age: int = Field(1, ge=1)
    """tail=carry: steps that a trajectory may be carried; then its group is waited for."""
