"""Checks a parallel layout before anything starts. Pure: no torch, no megatron.

Every error names the operands and the value to set.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import ActorSettings, RunnerSettings


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel dimensions; their product is the number of ranks."""

    tensor: int
    pipeline: int
    context: int
    data: int
    virtual: int = 1
    expert: int = 1
    """Ranks that a layer's experts are spread over. They are part of tensor x context x data, not a further factor."""


def check_layout(settings: ActorSettings, model: ModelConfig, world_size: int, runner: RunnerSettings | None = None) -> Layout:
    """The layout of `world_size` ranks. Raises ValueError with one line per problem."""
    parallel = settings.model
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, vp = parallel.context_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    problems: list[str] = []

    def key(name: str) -> str:
        return f"actor.model.{name}"

    for what, size in (
        ("attention heads", model.num_heads),
        ("key/value heads", model.num_kv_heads),
        ("vocabulary", model.vocab_size),
        ("MLP width", model.intermediate_size),
    ):
        if what == "MLP width" and model.is_moe:
            continue  # tensor parallelism does not split experts
        if size % tp:
            fitting = [n for n in range(1, tp) if size % n == 0]
            problems.append(
                f"{key('tensor_model_parallel_size')}={tp} does not divide the model's {what} ({size}); set it to {fitting[-1]}"
            )
    if parallel.sequence_parallel and tp == 1:
        problems.append(
            f"{key('sequence_parallel')}=True needs tensor parallelism, but "
            f"{key('tensor_model_parallel_size')}=1; set sequence_parallel to False"
        )
    stages = pp * vp
    if model.num_layers % stages:
        fitting = [n for n in range(1, stages) if model.num_layers % n == 0]
        problems.append(
            f"{model.num_layers} layers do not divide into {stages} pipeline stages ("
            f"{key('pipeline_model_parallel_size')}={pp} x virtual {vp}); "
            f"use a number of stages such as {fitting[-1]}"
        )
    if vp > 1 and pp == 1:
        problems.append(
            f"{key('virtual_pipeline_model_parallel_size')}={vp} needs "
            f"{key('pipeline_model_parallel_size')} of at least 2; set it to null"
        )
    model_ranks = tp * pp * cp
    if world_size % model_ranks:
        problems.append(
            f"{world_size} actor ranks do not divide by tensor {tp} x pipeline {pp} x context {cp} = "
            f"{model_ranks}; place the actor on a multiple of {model_ranks} slots or lower a parallel size"
        )
    ep = parallel.expert_model_parallel_size
    problems += _expert_problems(settings, model, world_size)
    if parallel.recompute_granularity == "full" and not (parallel.recompute_method and parallel.recompute_num_layers):
        problems.append(
            f"{key('recompute_granularity')}=full needs {key('recompute_method')} (uniform or block) and "
            f"{key('recompute_num_layers')}; set uniform and 1"
        )
    problems += _setting_problems(settings, layers_per_chunk=model.num_layers // stages)
    if settings.optim.overlap_param_gather and not settings.optim.use_distributed_optimizer:
        problems.append("actor.optim.overlap_param_gather=True needs actor.optim.use_distributed_optimizer=True; set it")
    if runner is not None and runner.seq_length > runner.max_tokens_per_mbs * cp:
        problems.append(
            f"runner.seq_length={runner.seq_length} does not fit a micro-batch of runner.max_tokens_per_mbs="
            f"{runner.max_tokens_per_mbs} x context parallel {cp}; set max_tokens_per_mbs to at least "
            f"{-(-runner.seq_length // cp)}"
        )
    if problems:
        raise ValueError("\n".join(problems))
    data = world_size // model_ranks
    return Layout(tensor=tp, pipeline=pp, context=cp, data=data, virtual=vp, expert=ep)


def _setting_problems(settings: ActorSettings, layers_per_chunk: int) -> list[str]:
    """Optimizer, schedule, recompute and offload settings that contradict each other."""
    parallel, optim, schedule = settings.model, settings.optim, settings.lr_sched
    problems = []
    recomputed = parallel.recompute_num_layers or 0
    if parallel.recompute_granularity == "full" and 0 < layers_per_chunk < recomputed:
        problems.append(
            f"actor.model.recompute_num_layers={recomputed} exceeds the {layers_per_chunk} layers of a pipeline "
            f"stage; set it to at most {layers_per_chunk}"
        )
    if settings.offload_weight and not optim.use_distributed_optimizer:
        problems.append(
            "actor.offload_weight=True needs the contiguous weight buffer of actor.optim.use_distributed_optimizer="
            "True; set it, or offload_weight=False"
        )
    if optim.optimizer_cpu_offload and not optim.use_distributed_optimizer:
        problems.append(
            "actor.optim.optimizer_cpu_offload=True needs the shards of actor.optim.use_distributed_optimizer=True; set "
            "it, or optimizer_cpu_offload=False"
        )
    if optim.min_lr > optim.lr:
        problems.append(f"actor.optim.min_lr={optim.min_lr} exceeds actor.optim.lr={optim.lr}; lower it")
    decay = schedule.lr_decay_iters
    if schedule.lr_decay_style == "cosine" and decay is not None and decay <= schedule.lr_warmup_iters:
        problems.append(
            f"actor.lr_sched.lr_decay_iters={decay} ends before the warm-up of actor.lr_sched.lr_warmup_iters="
            f"{schedule.lr_warmup_iters} steps; raise it, or set it to null for runner.max_steps"
        )
    return problems


def _expert_problems(settings: ActorSettings, model: ModelConfig, world_size: int) -> list[str]:
    parallel = settings.model
    ep, pp = parallel.expert_model_parallel_size, parallel.pipeline_model_parallel_size
    key = "actor.model.expert_model_parallel_size"
    if not model.is_moe:
        return [f"{key}={ep}, but {model.architecture} has no experts; set it to 1"] if ep > 1 else []
    problems = []
    if model.num_experts % ep:
        fitting = [n for n in range(1, ep) if model.num_experts % n == 0]
        problems.append(f"{key}={ep} does not divide the model's {model.num_experts} experts; set it to {fitting[-1]}")
    if world_size % (ep * pp):
        problems.append(f"{world_size} actor ranks do not divide by expert {ep} x pipeline {pp} = {ep * pp}; lower {key}")
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        problems.append(
            f"{model.architecture} at actor.model.tensor_model_parallel_size="
            f"{parallel.tensor_model_parallel_size} would send every token to its experts once per tensor rank; "
            "set actor.model.sequence_parallel=True"
        )
    return problems
