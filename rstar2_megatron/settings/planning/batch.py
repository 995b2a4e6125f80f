"""Rows of the plan: placement, batch, micro-batches; and Ray's object store, which holds a batch."""

from __future__ import annotations

from collections.abc import Iterator

from rstar2_megatron.settings.placement import Slots
from rstar2_megatron.settings.planning.table import RunPlan, ranges_text
from rstar2_megatron.settings.schema import Settings

TOKEN_BYTES = 9  # id 4, mask 1, log-prob 4
LEAST_STORE_BYTES = 512 << 20
LEAST_SHARED_BYTES = 1 << 30  # of /dev/shm, on GPUs; a container has 64 MB by default
_STORE_MARGIN = 1.25


def trained_trajectories(settings: Settings) -> int:
    """The most trajectories that a step trains on."""
    algorithm = settings.algorithm
    sampling = algorithm.down_sampling
    kept = sampling.down_sampling_config.down_sample_to_n if sampling.do_down_sampling else algorithm.group_size
    return settings.data.rollout_batch_size * kept


def plan_placement(plan: RunPlan, settings: Settings, slots: Slots, places: dict[str, list[int]]) -> None:
    kind = "CPU slots" if slots.is_cpu else f"GPUs of {slots.memory_gb:.0f} GB"
    if slots.assumed:
        kind += " (assumed: none visible here)"
    plan.add("placement", "slots", f"{slots.count} {kind} on {settings.cluster.num_nodes} node(s)")
    for component in ("actor", "rollout", "reward"):
        plan.add("placement", component, ranges_text(places[component]))


def plan_supervised(plan: RunPlan, settings: Settings) -> None:
    """Of `runner.task_type` sft or preference."""
    own = settings.sft if settings.runner.task_type == "sft" else settings.preference
    rows = "conversations" if own is settings.sft else "comparisons of prefixes"
    plan.add(
        "batch",
        "step",
        f"{own.batch_size} {rows} of at most {own.max_length or settings.runner.seq_length} tokens, packed to "
        f"{settings.runner.max_tokens_per_mbs} tokens a micro-batch",
    )
    plan.add(
        "batch", "schedule", f"{own.epochs:g} epochs, lr {own.lr:g}, {own.warmup_ratio:.1%} warm-up, then {own.lr_decay_style}"
    )


def plan_batch(plan: RunPlan, settings: Settings, world: int) -> None:
    algorithm, parallel = settings.algorithm, settings.actor.model
    problems, rollouts = settings.data.rollout_batch_size, algorithm.group_size
    kept = trained_trajectories(settings) // problems
    data_parallel = world // parallel.ranks_of_copy
    plan.add(
        "batch",
        "step",
        f"{problems} problems x {rollouts} rollouts = {problems * rollouts} trajectories, "
        f"at most {problems * kept} kept ({kept} a group)",
    )
    plan.add("batch", "updates a step", str(algorithm.n_minibatches))
    plan.add(
        "batch",
        "parallel",
        f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size} x "
        f"context {parallel.context_parallel_size} x data {data_parallel}"
        + (f", experts {parallel.expert_model_parallel_size}" if parallel.expert_model_parallel_size > 1 else ""),
    )
    tokens = settings.runner.max_tokens_per_mbs
    longest = settings.runner.seq_length
    per_mbs = max(tokens // longest, 1)
    count = -(-problems * kept // (per_mbs * max(data_parallel, 1)))
    plan.add(
        "batch", "micro-batch", f"up to {tokens} tokens packed ({per_mbs} of the longest trajectories); at most {count} a rank"
    )
    plan.add(
        "batch",
        "trajectory",
        f"prompt {settings.data.max_prompt_length} + response {algorithm.sampling_params.max_new_tokens} "
        f"<= {longest} tokens, {settings.agentloop.max_assistant_turns} turns",
    )


def batch_tokens(settings: Settings) -> int:
    """Most tokens of a step's training batch."""
    return trained_trajectories(settings) * settings.runner.seq_length


def object_store_bytes(settings: Settings) -> int:
    """Size of Ray's object store: one batch at full length with a margin, at least 512 MiB."""
    return max(LEAST_STORE_BYTES, int(_STORE_MARGIN * TOKEN_BYTES * batch_tokens(settings)))


def object_store_problems(settings: Settings, memory_bytes: int, shared_bytes: int, *, gpus: bool = False) -> Iterator[str]:
    """A host without room for the object store of a private Ray head, in memory or in /dev/shm, or for NCCL's buffers."""
    store = object_store_bytes(settings)
    what = (
        f"the object store takes {store / 1e9:.1f} GB: {batch_tokens(settings)} tokens of a whole batch (data."
        f"rollout_batch_size={settings.data.rollout_batch_size}, runner.seq_length={settings.runner.seq_length}), "
        f"{TOKEN_BYTES} bytes each, and a quarter more"
    )
    if store > memory_bytes // 3:
        yield (
            f"{what}; that is more than a third of this host's {memory_bytes / 1e9:.1f} GB: lower one of them, or use a "
            "larger host"
        )
    elif store > max(shared_bytes, LEAST_STORE_BYTES):
        yield f"{what}; /dev/shm has {shared_bytes / 1e9:.1f} GB free: enlarge it (docker run --shm-size), or lower one of them"
    elif gpus and shared_bytes < LEAST_SHARED_BYTES:
        yield f"/dev/shm has {shared_bytes / 1e9:.2f} GB free, and NCCL keeps buffers there: docker run --shm-size=64g"
