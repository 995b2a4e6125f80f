"""What would fit where a plan does not: the fewest changes with which the whole plan has room. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import Settings

Change = dict[str, Any]
"""Values by dotted keys; empty where all stays."""
_ENGINE_SHARES = (0.8, 0.65, 0.5, 0.35)
RECOMPUTE: Change = {
    "actor.model.recompute_granularity": "full",
    "actor.model.recompute_method": "uniform",
    "actor.model.recompute_num_layers": 1,
}


def fewest_changes(
    settings: Settings, model: ModelConfig, world: int, engines: int, fits: Callable[[Settings], bool]
) -> Change:
    """The smallest change of layout, activations, optimizer's place and engine for which `fits` holds; {} if none is found.

    world, engines: GPUs of the actor and of the rollout. Of changes of one size, what costs less comes first.
    """
    dimensions = _dimensions(settings, model, world, engines)
    for choice in sorted(itertools.product(*dimensions), key=lambda choice: sum(map(bool, choice))):
        change = {key: value for part in choice for key, value in part.items()}
        if change and fits(changed(settings, change)):
            return change
    return {}


def changed(settings: Settings, change: Mapping[str, Any]) -> Settings:
    copy = settings.model_copy(deep=True)
    for key, value in change.items():
        section: Any = copy
        *parents, name = key.split(".")
        for parent in parents:
            section = getattr(section, parent)
        setattr(section, name, value)
    return copy


def as_words(change: Mapping[str, Any]) -> str:
    """As overrides of the command line."""
    return " ".join(f"{key}={value}" for key, value in change.items())


def _dimensions(settings: Settings, model: ModelConfig, world: int, engines: int) -> list[list[Change]]:
    """What each dimension may be, its present value first; a value that these GPUs cannot have is left out. The last
    dimension is tried first.
    """
    parallel, rollout = settings.actor.model, settings.rollout
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    others = pp * parallel.context_parallel_size
    width = model.num_heads if model.is_moe else model.intermediate_size  # tensor parallelism does not split experts
    tensors = _divisors(world // others, model.num_heads, model.num_kv_heads, model.vocab_size, width)
    experts = [n for n in range(1, world // pp + 1) if model.is_moe and model.num_experts % n == 0 and world % (n * pp) == 0]
    shares = [share for share in _ENGINE_SHARES if share != rollout.gpu_memory_utilization]
    offload = settings.actor.optim.use_distributed_optimizer and not settings.actor.optim.optimizer_cpu_offload
    return [
        [{}, *({"rollout.gpu_memory_utilization": share} for share in shares)],
        _sizes("rollout.tensor_parallel_size", rollout.tensor_parallel_size, _divisors(engines, model.num_kv_heads)),
        [{}, *([{"actor.optim.optimizer_cpu_offload": True}] if offload else [])],
        [{}, *({"runner.max_tokens_per_mbs": n} for n in smaller_micro_batches(settings))],
        [
            {**size, "actor.model.sequence_parallel": next(iter(size.values())) > 1} if size else size
            for size in _sizes("actor.model.tensor_model_parallel_size", tp, tensors)
        ],
        _sizes("actor.model.expert_model_parallel_size", parallel.expert_model_parallel_size, experts or [1]),
        [{}, *([RECOMPUTE] if parallel.recompute_granularity != "full" else [])],
    ]


def smaller_micro_batches(settings: Settings) -> list[int]:
    """Halves of `runner.max_tokens_per_mbs`, down to the longest trajectory."""
    tokens = settings.runner.max_tokens_per_mbs
    return [n for n in (tokens >> i for i in range(1, tokens.bit_length())) if n >= settings.runner.seq_length]


def _divisors(*numbers: int) -> list[int]:
    """The common divisors of all `numbers`."""
    return [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]


def _sizes(key: str, present: int, possible: list[int]) -> list[Change]:
    """A parallel size as it is, if it is possible, and each larger one; otherwise every possible one."""
    if present in possible:
        return [{}, *({key: size} for size in possible if size > present)]
    return [{key: size} for size in possible]
