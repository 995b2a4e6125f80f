"""Rows of the plan: what training while rolling out is expected to give, and the best split of the GPUs for it.

Every split whose actor fits its GPUs without going to the host is compared with the synchronous step that has actor and
engines on all GPUs in turn. The seconds are those of `times` and `engine_speed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.placement import Slots, collocated
from rstar2_megatron.settings.planning.advice import RECOMPUTE, changed
from rstar2_megatron.settings.planning.estimates import engines_of, handover_s, host_optimizer_s, sync_s, train_s
from rstar2_megatron.settings.planning.kv_cache import kv_capacity
from rstar2_megatron.settings.planning.memory import CUDA_OVERHEAD_GB, ENGINE_WORK_GB, engine_residue_gb, training_memory
from rstar2_megatron.settings.planning.table import RunPlan, ranges_text
from rstar2_megatron.settings.schema import Settings

ALONE_SHARE = 0.85  # rollout.gpu_memory_utilization of engines on GPUs of their own
RECOMPUTE_COST = 4 / 3  # one more forward
_OFFLOAD = ("actor.offload_weight", "actor.offload_grad", "actor.offload_optimizer")
_SHARE = "rollout.gpu_memory_utilization"
_WORTH = 1.02  # less is within what the closed forms can tell


@dataclass(frozen=True)
class Split:
    """Expected seconds from step to step with the actor on the first `actor` GPUs and engines on the others."""

    actor: int
    total: int
    step_s: float
    recompute: bool
    """Whether the actor fits only with full recompute, other than the YAML's."""

    def __str__(self) -> str:
        ranges = (ranges_text([*range(self.actor)]), ranges_text([*range(self.actor, self.total)]))
        more = ", actor.model.recompute_granularity=full" if self.recompute else ""
        return f"actor {ranges[0]}, rollout {ranges[1]}{more}"


def plan_split(
    plan: RunPlan, settings: Settings, slots: Slots, model: ModelConfig, places: Mapping[str, Sequence[int]]
) -> None:
    """One row, where the YAML fits several GPUs and there is a synchronous step on all of them to compare with."""
    if slots.count == 1 or plan.problems or plan.kv_capacity_tokens is None or settings.actor.model.precision != "bf16":
        return
    together = collocated_step_s(settings, slots, model)
    if together is None:
        return
    bound = settings.algorithm.max_staleness
    told = [f"synchronous on all {slots.count} GPUs {together:.0f} s a step"]
    if bound and not collocated(settings.cluster, slots):
        actor, engines = len(places.get("actor", ())), plan.num_engines
        here = _apart_s(settings, model, actor, engines, plan.kv_capacity_tokens, bound)
        told.append(f"this placement {_against(here, together)}")
    found = list(splits(settings, slots, model, max(bound, 1)))
    if found:
        best = min(found, key=lambda split: split.step_s)
        better = "best with" if best.step_s * _WORTH < together else "no split is better: with"
        told.append(f"{better} {best} {_against(best.step_s, together)}")
    else:
        told.append("no split of them fits")
    plan.add("expected", f"max_staleness={max(bound, 1)}", "; ".join(told))


def _against(seconds: float, together: float) -> str:
    return f"{seconds:.0f} s, {together / seconds:.2f} times the trajectories/s"


def collocated_step_s(settings: Settings, slots: Slots, model: ModelConfig) -> float | None:
    """Seconds of the synchronous step on all GPUs, the actor offloaded while engines generate; None if it does not fit."""
    offloading = changed(settings, dict.fromkeys(_OFFLOAD, True))
    gpu_gb, residue = slots.memory_gb or 0.0, engine_residue_gb(settings)
    if training_memory(offloading, model, slots.count, cpu=False).total + residue > gpu_gb:
        return None
    free = gpu_gb - CUDA_OVERHEAD_GB
    share = min(settings.rollout.gpu_memory_utilization, 1 - (residue + ENGINE_WORK_GB) / free)
    kv_tokens = kv_capacity(changed(offloading, {_SHARE: share}), model, free)
    if kv_tokens < settings.runner.seq_length:
        return None
    engines = engines_of(settings, model, slots.count // settings.rollout.tensor_parallel_size, kv_tokens)
    training = train_s(settings, model, slots.count) + host_optimizer_s(settings, model)
    return engines.phase_s() + training + handover_s(model, slots.count) + sync_s(model)


def splits(settings: Settings, slots: Slots, model: ModelConfig, bound: int) -> Iterator[Split]:
    """Every split of the GPUs that fits, with what a step takes at `algorithm.max_staleness=bound`."""
    parallel, tp = settings.actor.model, settings.rollout.tensor_parallel_size
    pp = parallel.pipeline_model_parallel_size
    ranks = parallel.tensor_model_parallel_size * pp * parallel.context_parallel_size
    alone = changed(settings, {**dict.fromkeys(_OFFLOAD, False), _SHARE: ALONE_SHARE})
    kv_tokens = kv_capacity(alone, model, slots.memory_gb)
    if kv_tokens < settings.runner.seq_length:
        return
    for actor in range(ranks, slots.count, ranks):
        engines = (slots.count - actor) // tp
        if (slots.count - actor) % tp or actor % (parallel.expert_model_parallel_size * pp):
            continue
        recompute = not _fits(alone, model, actor, slots)
        if recompute and not _fits(changed(alone, RECOMPUTE), model, actor, slots):
            continue
        cost = RECOMPUTE_COST if recompute and parallel.recompute_granularity != "full" else 1.0
        seconds = _apart_s(settings, model, actor, engines, kv_tokens, bound, cost)
        yield Split(actor, slots.count, seconds, recompute)


def _apart_s(
    settings: Settings, model: ModelConfig, actor: int, engines: int, kv_tokens: int, bound: int, cost: float = 1.0
) -> float:
    trained = cost * train_s(settings, model, actor) + host_optimizer_s(settings, model) + sync_s(model)
    return max(trained, engines_of(settings, model, engines, kv_tokens).batch_s(bound) + sync_s(model))


def _fits(settings: Settings, model: ModelConfig, gpus: int, slots: Slots) -> bool:
    return training_memory(settings, model, gpus, cpu=False).total <= (slots.memory_gb or 0.0)
