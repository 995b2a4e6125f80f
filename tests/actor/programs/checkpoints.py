"""What the rank processes of checkpoint tests run: top-level functions, because they are pickled by name."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rstar2_megatron.actor import checkpoint, optimizer_state
from rstar2_megatron.records.disk import NotWritten
from tests.actor.programs.training import Batch, open_actor


def save_then_train(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
    in_background: bool,
) -> tuple[list[dict[str, float]], bool]:
    """Two steps, a checkpoint, the remaining steps (an export where none remain).

    Also: was the directory there when training ended?
    """
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        for batch in batches[:2]:
            actor.train_step(batch)
        actor.save_checkpoint(directory, wait=not in_background)
        if not batches[2:]:
            actor.export_hf(directory.with_name("exported"))
        later = [actor.train_step(batch) for batch in batches[2:]]
        actor.finish_checkpoint()
        return later, directory.exists()


def save_on_a_slow_disk(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path, batches: list[Batch]
) -> None:
    """A good checkpoint after two steps, then a second one over it whose files never reach the disk."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        for batch in batches[:2]:
            actor.train_step(batch)
        actor.save_checkpoint(directory)
        actor.train_step(batches[2])
        os.fsync = lambda fd: time.sleep(600)
        actor.save_checkpoint(directory)


def save_on_a_full_disk(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path
) -> list[str]:
    """What is raised for a checkpoint, and with one rank for an exported model, that the disk has no room for."""
    told = []
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        try:
            actor.save_checkpoint(directory / "actor")
        except NotWritten as error:
            told.append(str(error))
        try:
            if world_size == 1:
                actor.export_hf(directory / "model")
        except NotWritten as error:
            told.append(str(error))
    return told


def resume(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path, batches: list[Batch]
) -> list[dict[str, float]]:
    """Load a checkpoint into a new actor that has already trained on something else, and continue."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        actor.train_step(batches[-1])
        actor.load_checkpoint(directory)
        return [actor.train_step(batch) for batch in batches[2:]]


def resume_with_other_moments(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    other: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
) -> list[list[tuple[Any, ...]]]:
    """Betas and eps of the optimizer's groups: saved under `config`, then loaded and trained under `other`."""
    seen = []
    for settings in (config, other):
        with open_actor(rank, world_size, init_method, settings, model_path) as actor:
            if settings is other:
                actor.load_checkpoint(directory)
            actor.train_step(batches[0])
            seen.append([(tuple(g["betas"]), g["eps"]) for g in actor.policy.optimizer.param_groups])
            if settings is config:
                actor.save_checkpoint(directory)
    return seen


def keep_and_resume(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path, batches: list[Batch]
) -> tuple[list[float], list[float]]:
    """Learning rates of a run that keeps the optimizer of two steps: uninterrupted, and resumed after its first step."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        for batch in batches[:2]:
            actor.train_step(batch)
        actor.keep_optimizer()
        first = actor.train_step(batches[2])["actor/lr"]
        actor.save_checkpoint(directory)
        rest = [actor.train_step(batch)["actor/lr"] for batch in batches[3:]]
        actor.reset_optimizer(actor.actor.optim, actor.actor.lr_sched, actor.max_optimizer_steps)
        actor.load_checkpoint(directory)
        return [first, *rest], [actor.train_step(batch)["actor/lr"] for batch in batches[3:]]


def save_and_continue(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
    bucket_size: int | None = None,
) -> tuple[dict[str, int], dict[str, float]]:
    """A step, a checkpoint, another step: (checksums of the exported weights when saved, metrics of the second step)."""
    with open_actor(rank, world_size, init_method, config, model_path, bucket_size) as actor:
        actor.train_step(batches[0])
        actor.save_checkpoint(directory)
        return actor.weights_checksum(), actor.train_step(batches[1])


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside have made and that still live: at most, by kind of device."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                new = storage._cdata not in inputs and storage._cdata not in self._live
                if new and not tensor.is_meta:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def save_and_count(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batch: Batch,
    bucket_size: int,
    piece_bytes: int,
) -> tuple[int, int, int]:
    """Bytes that a save, and a load in pieces, took at most on this rank, beside model and optimizer.

    And how often the load read what the checkpoint's files hold.
    """
    buckets = bucket_size if config[0].optim.overlap_grad_reduce else None
    with (
        mock.patch.object(checkpoint, "LOAD_PIECE_BYTES", piece_bytes),
        open_actor(rank, world_size, init_method, config, model_path, buckets) as actor,
    ):
        actor.train_step(batch)
        with _LiveBytes() as count:
            actor.save_checkpoint(directory, wait=False)
        actor.finish_checkpoint()
        plain = FileSystemReader.read_metadata
        with (
            _LiveBytes() as loading,
            mock.patch.object(FileSystemReader, "read_metadata", autospec=True, side_effect=plain) as read,
        ):
            actor.load_checkpoint(directory)
        return count.peak, loading.peak, read.call_count


def load_each(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directories: list[Path],
    batch: Batch,
    bucket_size: int | None = None,
    piece_bytes: int = checkpoint.LOAD_PIECE_BYTES,
) -> list[tuple[dict[str, int], dict[str, float]]]:
    """For each checkpoint, loaded into a new process group: (checksums of the weights, metrics of the next step)."""
    results = []
    with (
        mock.patch.object(checkpoint, "LOAD_PIECE_BYTES", piece_bytes),
        open_actor(rank, world_size, init_method, config, model_path, bucket_size) as actor,
    ):
        for directory in directories:
            actor.load_checkpoint(directory)
            results.append((actor.weights_checksum(), actor.train_step(batch)))
        return results


def gather_before_a_step(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path
) -> tuple[int, float, float]:
    """States gathered by the first rank, their largest moment, the largest master; the optimizer has no state yet.

    So it is with TransformerEngine's Adam; torch's gets its state from this project.
    """
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        optimizer, found = actor.policy.optimizer, []
        for part in optimizer.chained_optimizers:
            part.optimizer.state.clear()
            gathered = optimizer_state.gather(part) or {}
            found += [pieces for by_dtype in gathered.values() for pieces in by_dtype.values()]
        tensors = {name: [t for p in found for t in p[name]._pieces.values()] for name in found[0]} if found else {}
        moments = [t for name in ("exp_avg", "exp_avg_sq") for t in tensors.get(name, [])]
        masters = tensors.get("param", [])
        largest = [max((float(t.abs().max()) for t in group), default=0.0) for group in (moments, masters)]
        return len(masters), largest[0], largest[1]
