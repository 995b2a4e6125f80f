"""Rows of the plan: memory of training on a GPU and on a node's host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.placement import Slots, collocated
from rstar2_megatron.settings.planning.host_memory import host_memory
from rstar2_megatron.settings.planning.memory import engine_residue_gb, training_memory
from rstar2_megatron.settings.planning.table import RunPlan, gb_text
from rstar2_megatron.settings.schema import Settings


def plan_training(
    plan: RunPlan, settings: Settings, slots: Slots, model: ModelConfig, world: int, remedy: Callable[[], str]
) -> None:
    """remedy: what would fit, asked where this does not."""
    memory = training_memory(settings, model, world, cpu=slots.is_cpu)
    plan.actor_memory = memory
    shares_gpu = settings.runner.task_type == "reasoning" and not slots.is_cpu and collocated(settings.cluster, slots)
    engine = engine_residue_gb(settings) if shares_gpu else 0.0
    total = memory.total + engine
    parts = (
        f"weights {gb_text(memory.weights)} + gradients {gb_text(memory.gradients)} + optimizer {gb_text(memory.optimizer)} "
        f"+ activations {gb_text(memory.activations)} + vocabulary head {gb_text(memory.head)}"
    )
    if memory.overhead:
        parts += f" + CUDA {memory.overhead:.0f}"
    if engine:
        parts += f" + sleeping engine {engine:.1f}"
    plan.add("training", "GB per rank", f"{gb_text(total)} = {parts}")
    flops = model.train_flops([settings.runner.seq_length]) / settings.runner.seq_length
    plan.add(
        "training",
        "FLOP per token",
        f"{flops / 1e9:.3g} G at full length" if flops >= 1e8 else f"{flops / 1e6:.3g} M at full length",
    )
    if slots.memory_gb is None:
        return
    if total <= slots.memory_gb:
        plan_host(plan, settings, slots, model, world)
        return
    name = Path(settings.rollout.model.model_path).name
    tp = settings.actor.model.tensor_model_parallel_size
    if memory.static + memory.overhead + engine > slots.memory_gb:
        cause = f"{memory.static:.0f} GB per GPU for weights, gradients and optimizer"
        if memory.static <= slots.memory_gb:
            cause += f" beside {memory.overhead + engine:.0f} GB of CUDA and sleeping engines"
    else:
        tokens = settings.runner.max_tokens_per_mbs
        cause = f"{total:.0f} GB per GPU with the activations of {tokens} tokens"
        if engine:
            cause += f" and {engine:.1f} GB that a sleeping engine keeps"
    plan.problems.append(f"{name} at TP {tp} needs {cause}, has {slots.memory_gb:.0f}; {remedy()}")


def plan_host(plan: RunPlan, settings: Settings, slots: Slots, model: ModelConfig, world: int) -> None:
    """Host memory of a node."""
    host = host_memory(settings, model, world)
    on_host = "updated there" if settings.actor.optim.optimizer_cpu_offload else "pinned"
    plan.add(
        "host",
        "GB per node",
        f"{host.total:.0f} of {slots.host_gb:.0f} = optimizer {host.optimizer:.0f} ({on_host}) + weights "
        f"{host.weights:.0f} + a checkpoint written or loaded {host.checkpoint:.0f} + processes {host.processes:.0f}",
    )
    if host.total > slots.host_gb:
        remedy = "use more nodes or hosts with more memory"
        if not settings.actor.optim.optimizer_cpu_offload and settings.actor.offload_optimizer:
            remedy = "place actor and rollout on GPUs of their own with actor.offload_optimizer=False, or " + remedy
        plan.problems.append(
            f"a node's host needs {host.total:.0f} GB ({host.optimizer:.0f} optimizer, {host.weights:.0f} weights, "
            f"{host.checkpoint:.0f} while a checkpoint is written, {host.processes:.0f} processes), has "
            f"{slots.host_gb:.0f}; {remedy}"
        )
