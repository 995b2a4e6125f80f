"""Everything that the plan estimates: seconds of a step and of the best split, a step's transport, GPU hours of a search.

No GPU has fitted the constants: they are data sheets of the H100 times assumed shares, and `--check` prints what a machine
reaches beside them. `benchmarks/rollout` simulates the same engines event by event; the closed forms here are for `--dry-run`,
and a test holds them against the simulated steps of benchmarks/results/asynchronous.json. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.placement import Slots, collocated
from rstar2_megatron.settings.planning.advice import RECOMPUTE, changed
from rstar2_megatron.settings.planning.batch import TOKEN_BYTES, batch_tokens, object_store_bytes, trained_trajectories
from rstar2_megatron.settings.planning.kv_cache import kv_bytes_per_token, kv_capacity
from rstar2_megatron.settings.planning.memory import CUDA_OVERHEAD_GB, ENGINE_WORK_GB, engine_residue_gb, training_memory
from rstar2_megatron.settings.planning.table import RunPlan, ranges_text
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
ALONE_SHARE = 0.85  # rollout.gpu_memory_utilization of engines on GPUs of their own
RECOMPUTE_COST = 4 / 3  # one more forward
_WORTH = 1.02  # a split that is less faster is within what the closed forms can tell
# Transport, by the row of 512 x 32 of `python -m benchmarks.paper_step --problems 4 64 128 256 512`.
DRIVER_BASE_GB = 0.6
DRIVER_BYTES_PER_TOKEN = 5.0  # texts and figures of every trajectory
ENGINE_BYTES_PER_TOKEN = 29.0  # tokens until the batch is put, one copy of the part that is trained on, texts under way
CPU_S_PER_MTOKEN = 0.3  # driver, channel, grading of text, resampling and batch, for a million tokens
_OFFLOAD = ("actor.offload_weight", "actor.offload_grad", "actor.offload_optimizer")
_SHARE = "rollout.gpu_memory_utilization"


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

_NEAR = 0.5  # of the deadline: what is expected was measured on no GPU


def plan_times(plan: RunPlan, settings: Settings, model: ModelConfig, world: int) -> None:
    """Expected seconds of a synchronous step, for responses of the paper's lengths."""
    if plan.kv_capacity_tokens is None or settings.actor.model.precision != "bf16":
        return
    engines = engines_of(settings, model, plan.num_engines, plan.kv_capacity_tokens)
    rollout, training, host = engines.phase_s(), train_s(settings, model, world), host_optimizer_s(settings, model)
    limit, on_host, late = settings.runner.step_timeout_s, "", ""
    if rollout + training + host > _NEAR * limit:
        late = f"; a longer step than runner.step_timeout_s={limit:g} fails: raise it"
    if host:
        on_host = f" + optimizer on the host {host:.1f} ({HOST_SHARE:.0%} of {HOST_BYTES_PER_S / 1e9:.0f} GB/s)"
    plan.add(
        "expected",
        "seconds a step",
        f"rollout {rollout:.0f} + training {training:.0f}{on_host}, with quick tools (H100, "
        f"responses of {MEAN_LENGTH:.0%} of the limit in the mean, {train_share(model):.0%} of peak FLOP/s, {DECODE_SHARE:.0%} "
        f"of bandwidth){late}",
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


# ------------------------------------------------------------------- the best split of the GPUs, and transport


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
        actor, engines = len(places["actor"]), plan.num_engines
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
    pp, ranks = parallel.pipeline_model_parallel_size, parallel.ranks_of_copy
    alone = changed(settings, {**dict.fromkeys(_OFFLOAD, False), _SHARE: ALONE_SHARE})
    gpu_gb, kv_tokens = slots.memory_gb or 0.0, kv_capacity(alone, model, slots.memory_gb)
    if kv_tokens < settings.runner.seq_length:
        return
    for actor in range(ranks, slots.count, ranks):
        engines = (slots.count - actor) // tp
        if (slots.count - actor) % tp or actor % (parallel.expert_model_parallel_size * pp):
            continue
        whole, least = (training_memory(s, model, actor, cpu=False).total for s in (alone, changed(alone, RECOMPUTE)))
        recompute = whole > gpu_gb
        if recompute and least > gpu_gb:
            continue
        cost = RECOMPUTE_COST if recompute and parallel.recompute_granularity != "full" else 1.0
        seconds = _apart_s(settings, model, actor, engines, kv_tokens, bound, cost)
        yield Split(actor, slots.count, seconds, recompute)


def _apart_s(
    settings: Settings, model: ModelConfig, actor: int, engines: int, kv_tokens: int, bound: int, cost: float = 1.0
) -> float:
    trained = cost * train_s(settings, model, actor) + host_optimizer_s(settings, model) + sync_s(model)
    return max(trained, engines_of(settings, model, engines, kv_tokens).batch_s(bound) + sync_s(model))


def plan_transport(plan: RunPlan, settings: Settings, engines: int) -> None:
    """Rows for trajectories of half the longest length; the object store is for the longest."""
    trajectories = settings.data.rollout_batch_size * settings.algorithm.group_size
    length = settings.runner.seq_length // 2
    tokens = trajectories * length
    driver = DRIVER_BASE_GB + DRIVER_BYTES_PER_TOKEN * tokens / 1e9
    held = ENGINE_BYTES_PER_TOKEN * tokens / max(engines, 1) / 1e9
    plan.add(
        "transport",
        "host memory",
        f"driver {driver:.1f} GB, each of {engines} rollout workers {held:.1f} GB for tokens ({trajectories} trajectories of "
        f"{length} tokens)",
    )
    store, batch = object_store_bytes(settings), TOKEN_BYTES * batch_tokens(settings)
    plan.add(
        "transport",
        "object store",
        f"{store / 1e9:.1f} GB for a batch of at most {batch / 1e9:.1f} GB ({TOKEN_BYTES} bytes a token)",
    )
    plan.add(
        "transport",
        "seconds a step",
        f"{CPU_S_PER_MTOKEN * tokens / 1e6:.0f} CPU s of driver, channel, grading and batch, most of them during the rollout",
    )


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
