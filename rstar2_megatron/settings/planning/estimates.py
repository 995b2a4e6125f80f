"""Estimated seconds of a step and GPU hours of a search's stages, on H100s. Pure arithmetic.

No GPU has fitted the constants: they are data sheets times assumed shares, and `--check` prints what a machine reaches beside
them. `benchmarks/rollout` simulates the same engines event by event; the closed forms here are for `--dry-run`, and a test
holds them against the simulated steps of benchmarks/results/asynchronous.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.batch import trained_trajectories
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token
from rstar2_megatron.settings.planning.table import RunPlan
from rstar2_megatron.settings.schema import Settings

# H100 SXM: dense bf16 FLOP/s and memory bandwidth, and the assumed shares of them.
PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 3.35e12
TRAIN_SHARE, PREFILL_SHARE, DECODE_SHARE = 0.4, 0.4, 0.6
# Of a mixture of experts, by an estimate for micro-batches of 20,480 tokens: GEMMs are small, each layer waits for the host.
EXPERTS_TRAIN_SHARE = 0.3
# Mean length of a response as a share of the longest, and mean of its square: the paper's 8K stage as
# benchmarks/rollout/traces.py has it, with one trajectory of ten at the limit.
MEAN_LENGTH, MEAN_SQUARE = 0.45, 0.28
# By the simulator: the share of the KV cache that responses fill while work waits, and how often a step of rollouts that never
# stop computes the cache again, for the new weights and for prefixes that gave way.
CACHE_IN_USE, CACHES_AGAIN = 0.75, 1.5
# Host memory bandwidth of two sockets with eight DDR5-4800 channels each, and the assumed share of it. AdamW on the host
# reads and writes 36 bytes a parameter: gradient, master, two moments, and the bf16 weight.
HOST_BYTES_PER_S, HOST_SHARE = 614e9, 0.5
HOST_BYTES_PER_PARAMETER = 36
LINK_BYTES_PER_S = 25e9  # of a weight sync, and of a GPU's way to host memory
_STATE_BYTES = 18  # a parameter on the GPUs: weights, gradients, fp32 copy, two moments
SOLUTIONS = 2  # right solutions of a problem that SFT takes (`search/traces.py`)


def train_share(model: ModelConfig) -> float:
    """Share of the peak FLOP/s in training."""
    return EXPERTS_TRAIN_SHARE if model.is_moe else TRAIN_SHARE


@dataclass(frozen=True)
class EngineSpeed:
    """Seconds of a decode step: base + per_request * requests + per_token * tokens in context; and of prefill."""

    decode_base_s: float
    decode_per_request_s: float
    decode_per_token_s: float
    prefill_base_s: float
    prefill_per_token_s: float
    prefill_chunk_tokens: int = 8192

    @classmethod
    def of_gpu(cls, parameters: float, kv_bytes: float, tp: int, active: float | None = None) -> EngineSpeed:
        """Roofline of a bf16 model on `tp` H100s: weights and context are read once a step.

        kv_bytes: of a token in the KV cache. active: parameters that a token uses; None for all.
        """
        read = 1 / (PEAK_BYTES_PER_S * DECODE_SHARE * tp)
        compute = 2 * (active or parameters) / (PEAK_FLOPS * PREFILL_SHARE * tp)
        return cls(2 * parameters * read + 1e-3, compute, kv_bytes * read, 5e-3, compute)


@dataclass(frozen=True)
class Engines:
    """Engines of one kind and the trajectories of a step, which they share evenly. Calls of tools are quick."""

    count: int
    speed: EngineSpeed
    kv_tokens: int
    """Of one engine."""
    max_requests: int
    trajectories: int
    longest: int
    """Tokens of the longest response."""

    def phase_s(self) -> float:
        """A rollout phase: the full caches, and at its end the decode steps of a last trajectory."""
        return self._tokens_s + self.speed.decode_base_s * (self._full_steps + self.longest)

    def batch_s(self, staleness: int) -> float:
        """From batch to batch where engines never wait and `staleness` + 1 batches are under way."""
        steps = max(self._full_steps, self.longest / (staleness + 1))
        running = MEAN_SQUARE / MEAN_LENGTH / 2 * self.longest  # mean tokens of a response under way
        again = CACHES_AGAIN * min(self.kv_tokens, (staleness + 1) * self._each * running)
        return self._tokens_s + self.speed.decode_base_s * steps + again * self.speed.prefill_per_token_s

    @property
    def _each(self) -> float:
        return self.trajectories / self.count

    @property
    def _tokens(self) -> float:
        return self._each * MEAN_LENGTH * self.longest

    @property
    def _token_steps(self) -> float:
        """Tokens in the cache, summed over decode steps."""
        return self._each * MEAN_SQUARE * self.longest**2 / 2

    @property
    def _tokens_s(self) -> float:
        """What requests and their contexts cost in decode steps, whatever the schedule."""
        speed = self.speed
        return self._tokens * speed.decode_per_request_s + self._token_steps * speed.decode_per_token_s

    @property
    def _full_steps(self) -> float:
        """Decode steps with as many requests as the cache and `max_requests` allow."""
        return max(self._token_steps / (CACHE_IN_USE * self.kv_tokens), self._tokens / self.max_requests)


# ------------------------------------------------------------------------------------------ seconds of a step


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
    length = round(MEAN_LENGTH * settings.runner.seq_length)
    flops = model.train_flops([length]) * trained_trajectories(settings)
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


# -------------------------------------------------------------------------------------- hours of a search


def search_hours(settings: Settings, model: ModelConfig, kv_capacity_tokens: int) -> tuple[float, float]:
    """(GPU hours of `search.rollouts`, GPU hours of all `search.more_rollouts`) for `search.num_problems` problems.

    A rollout is counted as `search.candidates` solutions of half the longest length. That is what it generates when every node
    on its way is new, so trees that come back to old nodes cost less. A reward model of the policy's size reads each token.
    """
    search, length = settings.search, settings.runner.seq_length // 2
    rate = _decode_tokens_per_s(settings, model, kv_capacity_tokens, length)
    seconds = settings.rollout.tensor_parallel_size / rate
    if search.reward_model is not None:
        seconds += model.train_flops([length]) / 3 / length / (PEAK_FLOPS * train_share(model))
    per_rollout = search.num_problems * search.candidates * length * seconds / 3600
    return search.rollouts * per_rollout, search.more_rollouts * per_rollout


def sft_hours(settings: Settings, model: ModelConfig, problems: int) -> float:
    """GPU hours of SFT on two solutions, of half the longest length, of each of `problems` problems."""
    length = (settings.sft.max_length or settings.runner.seq_length) // 2
    return _training(model, length, SOLUTIONS * problems * settings.sft.epochs)


def preference_hours(settings: Settings, model: ModelConfig, problems: int) -> float:
    """GPU hours of a preference model: a comparison at every second depth of a tree, of prefixes of a quarter of the length."""
    own = settings.preference
    length = (own.max_length or settings.runner.seq_length) // 4
    prefixes = 2 * own.best * settings.search.depth / 2
    return _training(model, length, prefixes * problems * own.epochs)


def _training(model: ModelConfig, length: int, sequences: float) -> float:
    return model.train_flops([length]) * sequences / (PEAK_FLOPS * train_share(model)) / 3600


def _decode_tokens_per_s(settings: Settings, model: ModelConfig, kv_capacity_tokens: int, length: int) -> float:
    """Tokens that one engine generates in a second, with as many trajectories of `length` tokens as fit."""
    rollout = settings.rollout
    running = max(min(rollout.max_running_requests, kv_capacity_tokens // length), 1)
    read = 2 * model.num_parameters + running * length / 2 * kv_bytes_per_token(model, "bf16")
    return running * PEAK_BYTES_PER_S * rollout.tensor_parallel_size / read * DECODE_SHARE
