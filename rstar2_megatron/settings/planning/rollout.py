"""Rows of the plan: KV cache, trajectories in flight, and memory that engines share with the actor."""

from __future__ import annotations

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.placement import Slots, collocated
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token, kv_capacity
from rstar2_megatron.settings.planning.memory import ENGINE_WORK_GB, GB, WIDTH, engine_residue_gb
from rstar2_megatron.settings.planning.table import RunPlan, gb_text
from rstar2_megatron.settings.schema import Settings


def plan_rollout(plan: RunPlan, settings: Settings, slots: Slots, model: ModelConfig, num_slots: int) -> None:
    rollout = settings.rollout
    plan.num_engines = engines = max(num_slots // rollout.tensor_parallel_size, 1)
    trajectories = settings.data.rollout_batch_size * settings.algorithm.group_size
    longest = settings.runner.seq_length
    plan.add("rollout", "engines", f"{engines} x TP {rollout.tensor_parallel_size}")
    if slots.is_cpu and rollout.max_total_tokens is None:
        plan.problems.append(
            "rollout.max_total_tokens is null, but on CPU the KV cache has no natural size; set it, e.g. "
            f"rollout.max_total_tokens={max(65536, 8 * longest)}"
        )
        return
    free = slots.memory_gb
    if free is not None and collocated(settings.cluster, slots):
        free = max(free - _actor_beside_engines(plan, settings), 0.0)
    capacity = kv_capacity(settings, model, free)
    plan.kv_capacity_tokens = capacity
    if capacity < longest:
        weights = model.num_parameters * WIDTH[rollout.model.precision] / GB
        memory = "" if free is None else f" of {free:.0f} GB free per GPU"
        plan.problems.append(
            f"an engine of TP {rollout.tensor_parallel_size} has room for {max(capacity, 0)} KV tokens "
            f"beside {weights:.1f} GB of weights, a trajectory may need {longest} (gpu_memory_utilization="
            f"{rollout.gpu_memory_utilization}{memory}); raise rollout.gpu_memory_utilization, "
            "rollout.tensor_parallel_size or rollout.max_total_tokens"
        )
        return
    per_token = kv_bytes_per_token(model, rollout.model.precision)
    plan.add(
        "rollout",
        "KV cache an engine",
        f"{capacity:,} tokens of {per_token / 1024:.0f} KiB ({capacity * per_token / GB:.1f} GB): "
        f"{capacity // longest} trajectories at full length",
    )
    plan.add(
        "rollout",
        "trajectories an engine",
        f"{-(-trajectories // engines)} a step; in flight {min(rollout.max_running_requests, capacity // longest)} that "
        f"surely fit, {min(rollout.max_running_requests, 2 * capacity // longest)} at half length "
        f"(rollout.max_running_requests={rollout.max_running_requests})",
    )


def _actor_beside_engines(plan: RunPlan, settings: Settings) -> float:
    """GB of the actor on a GPU where an engine generates: CUDA context and parts that are not offloaded."""
    memory, actor = plan.actor_memory, settings.actor
    if memory is None:
        return 0.0
    if not actor.offloads:
        return memory.total
    stays = memory.overhead
    stays += 0 if actor.offload_weight else memory.weights
    stays += 0 if actor.offload_grad else memory.gradients
    return stays + (0 if actor.offload_optimizer else memory.optimizer)


def plan_sharing(plan: RunPlan, settings: Settings, slots: Slots, model: ModelConfig) -> None:
    """GB of a GPU shared by actor and engine, in each phase of a step."""
    memory, gpu_gb, rollout = plan.actor_memory, slots.memory_gb, settings.rollout
    if memory is None or gpu_gb is None:
        return
    actor, residue = settings.actor, engine_residue_gb(settings)
    stays = _actor_beside_engines(plan, settings)
    engine = rollout.gpu_memory_utilization * max(gpu_gb - stays, 0.0) + residue + ENGINE_WORK_GB
    weights = WIDTH[rollout.model.precision] * model.num_parameters / rollout.tensor_parallel_size / GB
    if actor.offloads:
        buckets = 2 * actor.weight_sync.bucket_mb * 2**20 / GB  # the buffer, and the tensor gathered for it
        of_actor = stays + (memory.weights if actor.offload_weight else 0) + buckets
        sync = of_actor + weights + residue
        plan.add(
            "sharing a GPU",
            "GB in turns",
            f"training {gb_text(memory.total + residue)}, weight sync {gb_text(sync)}, rollout {gb_text(engine + stays)} "
            f"(engine {gb_text(engine)} + actor {gb_text(stays)})",
        )
        if sync > gpu_gb:
            plan.problems.append(
                f"the weight sync needs {sync:.0f} GB per GPU ({of_actor:.0f} of the actor, {weights + residue:.0f} of the "
                f"engine), has {gpu_gb:.0f}; set actor.offload_grad=True actor.offload_optimizer=True or "
                "raise rollout.tensor_parallel_size"
            )
    else:
        plan.add("sharing a GPU", "GB at all times", f"{gb_text(engine + stays)} (nothing is offloaded)")
    if engine + stays > gpu_gb:
        share = 1 - (residue + ENGINE_WORK_GB) / (gpu_gb - stays) if stays < gpu_gb else 0.0
        plan.problems.append(
            f"collocated: the engine takes {engine:.0f} GB (rollout.gpu_memory_utilization="
            f"{rollout.gpu_memory_utilization} of what is free, and {residue + ENGINE_WORK_GB:.1f}) beside {stays:.0f} GB of "
            f"the actor, has {gpu_gb:.0f}; set "
            + (
                f"rollout.gpu_memory_utilization={int(100 * share) / 100}"
                if actor.offloads and share > 0
                else "actor.offload_weight=True actor.offload_grad=True actor.offload_optimizer=True"
            )
        )
