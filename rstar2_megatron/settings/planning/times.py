"""Expected seconds of a step on H100s, from bandwidth and FLOP/s."""

from __future__ import annotations

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.engine_speed import (
    DECODE_SHARE,
    MEAN_LENGTH,
    PEAK_FLOPS,
    Engines,
    EngineSpeed,
    train_share,
)
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token
from rstar2_megatron.settings.planning.table import RunPlan
from rstar2_megatron.settings.schema import Settings

# Host memory bandwidth of two sockets with eight DDR5-4800 channels each, and the assumed share of it. AdamW on the host
# reads and writes 36 bytes a parameter: gradient, master, two moments, and the bf16 weight.
HOST_BYTES_PER_S, HOST_SHARE = 614e9, 0.5
HOST_BYTES_PER_PARAMETER = 36
LINK_BYTES_PER_S = 25e9  # of a weight sync, and of a GPU's way to host memory
_STATE_BYTES = 18  # a parameter on the GPUs: weights, gradients, fp32 copy, two moments


def plan_times(plan: RunPlan, settings: Settings, model: ModelConfig, world: int) -> None:
    """Expected seconds of a synchronous step, for responses of the paper's lengths."""
    if plan.kv_capacity_tokens is None or settings.actor.model.precision != "bf16":
        return
    engines = engines_of(settings, model, plan.num_engines, plan.kv_capacity_tokens)
    host = host_optimizer_s(settings, model)
    on_host = ""
    if host:
        on_host = f" + optimizer on the host {host:.1f} ({HOST_SHARE:.0%} of {HOST_BYTES_PER_S / 1e9:.0f} GB/s)"
    plan.add(
        "expected",
        "seconds a step",
        f"rollout {engines.phase_s():.0f} + training {train_s(settings, model, world):.0f}{on_host}, with quick tools (H100, "
        f"responses of {MEAN_LENGTH:.0%} of the limit in the mean, {train_share(model):.0%} of peak FLOP/s, {DECODE_SHARE:.0%} "
        "of bandwidth)",
    )


def engines_of(settings: Settings, model: ModelConfig, count: int, kv_tokens: int) -> Engines:
    """`count` engines with `kv_tokens` each, and a step's trajectories."""
    idle = 0.0 if not model.is_moe else 1 - model.experts_per_token / model.num_experts
    tp, kv_bytes = settings.rollout.tensor_parallel_size, kv_bytes_per_token(model, "bf16")
    active = model.num_parameters - idle * model.expert_parameters
    return Engines(
        count,
        EngineSpeed.of_gpu(model.num_parameters, kv_bytes, tp, active),
        kv_tokens,
        settings.rollout.max_running_requests,
        settings.data.rollout_batch_size * settings.algorithm.group_size,
        settings.algorithm.sampling_params.max_new_tokens,
    )


def train_s(settings: Settings, model: ModelConfig, world: int) -> float:
    """Seconds of forward and backward on `world` GPUs over the trajectories that resampling keeps."""
    sampling = settings.algorithm.down_sampling
    kept = sampling.down_sampling_config.down_sample_to_n
    if not sampling.do_down_sampling:
        kept = settings.algorithm.group_size
    length = round(MEAN_LENGTH * settings.runner.seq_length)
    flops = model.train_flops([length]) * settings.data.rollout_batch_size * kept
    return flops / (world * PEAK_FLOPS * train_share(model))


def host_optimizer_s(settings: Settings, model: ModelConfig) -> float:
    """Seconds of the optimizer where it is updated on the host; 0 elsewhere."""
    if not settings.actor.optim.optimizer_cpu_offload:
        return 0.0
    moved = HOST_BYTES_PER_PARAMETER * model.num_parameters * settings.algorithm.n_minibatches
    return moved / (settings.cluster.num_nodes * HOST_BYTES_PER_S * HOST_SHARE)


def sync_s(model: ModelConfig) -> float:
    """Seconds of the weights' way from actor to engines."""
    return 2 * model.num_parameters / LINK_BYTES_PER_S


def handover_s(model: ModelConfig, gpus: int) -> float:
    """Seconds of the actor's state to the host and back, where engines take its `gpus` GPUs."""
    return 2 * _STATE_BYTES * model.num_parameters / gpus / LINK_BYTES_PER_S
