"""Expected seconds of a step on H100s, from bandwidth and FLOP/s."""

from __future__ import annotations

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token
from rstar2_megatron.settings.planning.table import RunPlan
from rstar2_megatron.settings.schema import Settings

# H100 SXM: dense bf16 FLOP/s and memory bandwidth, and the assumed shares of them.
PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 3.35e12
TRAIN_SHARE, DECODE_SHARE = 0.4, 0.5
# Host memory bandwidth of two sockets with eight DDR5-4800 channels each, and the assumed share of it. AdamW on the host
# reads and writes 36 bytes a parameter: gradient, master, two moments, and the bf16 weight.
HOST_BYTES_PER_S, HOST_SHARE = 614e9, 0.5
HOST_BYTES_PER_PARAMETER = 36


def decode_tokens_per_s(
    settings: Settings, model: ModelConfig, kv_capacity_tokens: int, length: int
) -> float:
    """Tokens that one engine generates in a second, with as many trajectories of `length` tokens as fit."""
    rollout = settings.rollout
    running = max(min(rollout.max_running_requests, kv_capacity_tokens // length), 1)
    read = 2 * model.num_parameters + running * length / 2 * kv_bytes_per_token(model, "bf16")
    return running * PEAK_BYTES_PER_S * rollout.tensor_parallel_size / read * DECODE_SHARE


def plan_times(plan: RunPlan, settings: Settings, model: ModelConfig, world: int) -> None:
    """Expected seconds of a step on H100s, for trajectories of half the longest length."""
    if plan.kv_capacity_tokens is None or settings.actor.model.precision != "bf16":
        return
    length = settings.runner.seq_length // 2
    algorithm, rollout = settings.algorithm, settings.rollout
    sampling = algorithm.down_sampling
    kept = sampling.down_sampling_config.down_sample_to_n
    if not sampling.do_down_sampling:
        kept = algorithm.group_size
    problems = settings.data.rollout_batch_size
    train_s = model.train_flops([length]) * problems * kept / (world * PEAK_FLOPS * TRAIN_SHARE)
    per_engine = decode_tokens_per_s(settings, model, plan.kv_capacity_tokens, length)
    tokens = problems * algorithm.group_size * length
    rollout_s = tokens / (per_engine * max(world // rollout.tensor_parallel_size, 1))
    host = ""
    if settings.actor.optim.optimizer_cpu_offload:
        moved = HOST_BYTES_PER_PARAMETER * model.num_parameters * algorithm.n_minibatches
        host_s = moved / (settings.cluster.num_nodes * HOST_BYTES_PER_S * HOST_SHARE)
        host = (
            f" + optimizer on the host {host_s:.1f} ({HOST_SHARE:.0%} of {HOST_BYTES_PER_S / 1e9:.0f} GB/s)"
        )
    plan.add(
        "expected",
        "seconds a step",
        f"rollout {rollout_s:.0f} + training {train_s:.0f}{host}, before the tail and tool latency (H100, {length} "
        f"tokens a trajectory, {TRAIN_SHARE:.0%} of peak FLOP/s, {DECODE_SHARE:.0%} of bandwidth)",
    )
