"""Sharded checkpoints that appear whole or not at all and load at another parallel layout.

Layout of a directory: megatron-core's torch_dist files (model, optimizer, step counters), and `random/` with
one file of generator states per rank, which is used when the number of ranks is the same.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rstar2_megatron.actor.model import bare

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_COUNTERS = "counters"
_RANDOM = "random"


def _sharded_state(chunks: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        state[key] = bare(chunk).sharded_state_dict(metadata=_METADATA)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=_METADATA)
    return state


def save(directory: str | Path, chunks: list[Any], optimizer: Any, counters: dict[str, Any]) -> None:
    """Write a checkpoint; collective. A kill at any moment leaves either the old directory or the new one."""
    final = Path(directory)
    partial = final.with_name(final.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _RANDOM).mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, loading=False)
    state[_COUNTERS] = counters
    dist_checkpointing.save(state, str(partial), content_metadata=_METADATA)
    torch.save(_random_states(), partial / _RANDOM / f"{dist.get_rank()}of{dist.get_world_size()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        previous = final.with_name(final.name + ".old")
        shutil.rmtree(previous, ignore_errors=True)
        if final.exists():
            final.rename(previous)
        partial.rename(final)
        shutil.rmtree(previous, ignore_errors=True)
    dist.barrier()


def load(directory: str | Path, chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """Restore model and optimizer in place and return the counters; collective.

    Raises ValueError when the directory is not a complete checkpoint. Random states are restored only under
    the number of ranks that saved them.
    """
    path = Path(directory)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ValueError(f"{path} is not a complete checkpoint: choose another global_step_N or start anew")
    state = dist_checkpointing.load(_sharded_state(chunks, optimizer, loading=True), str(path))
    for number, chunk in enumerate(chunks):
        bare(chunk).load_state_dict(state["model" if len(chunks) == 1 else f"model{number}"])
    optimizer.load_state_dict(state["optimizer"])
    file = path / _RANDOM / f"{dist.get_rank()}of{dist.get_world_size()}.pt"
    if file.exists():
        _restore_random_states(torch.load(file, weights_only=False))
    counters = state[_COUNTERS]
    assert isinstance(counters, dict)
    return counters


def _random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
