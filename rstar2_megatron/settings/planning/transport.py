"""Memory and seconds that a step's trajectories take between engines, driver and actor ranks.

The constants are from the row of 512 x 32 of `python -m benchmarks.paper_step --problems 4 64 128 256 512`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rstar2_megatron.settings.planning.batch import trained_trajectories
from rstar2_megatron.settings.planning.table import RunPlan
from rstar2_megatron.settings.schema import Settings

TOKEN_BYTES = 9  # id 4, mask 1, log-prob 4
DRIVER_BASE_GB = 0.6
DRIVER_BYTES_PER_TOKEN = 5.0  # texts and figures of every trajectory
ENGINE_BYTES_PER_TOKEN = 29.0  # tokens until the batch is put, one copy of the part that is trained on, texts under way
CPU_S_PER_MTOKEN = 0.3  # driver, channel, grading of text, resampling and batch, for a million tokens
LEAST_STORE_BYTES = 512 << 20
LEAST_SHARED_BYTES = 1 << 30  # of /dev/shm, on GPUs; a container has 64 MB by default
_STORE_MARGIN = 1.25


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
