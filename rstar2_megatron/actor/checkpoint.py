"""Sharded checkpoints: atomic, written in the background, loadable under another parallel layout.

A directory holds megatron-core's torch_dist files (model, optimizer, step counters) and `random/`, one file of
generator states per rank. The generator states are loaded only when the number of ranks is the same.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from rstar2_megatron.actor.network.model import unwrap
from rstar2_megatron.actor.optimizer_state import (
    PutState,
    begin_torch_adam,
    check_state_fits_weights,
    copy_views,
    gather,
    gathered_by,
    separate_steps,
    shapes,
    take_held_states,
)
from rstar2_megatron.records.disk import not_written, writing
from rstar2_megatron.settings.planning.host_memory import LOAD_PIECE_BYTES
from rstar2_megatron.settings.schema import ActorSettings

# megatron-core writes a process group into this dict, so callers pass copies. With the memory-efficient flag the first rank
# of each data-parallel group gathers the optimizer state over gloo in host memory. Otherwise every rank gathers it on its GPU.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True}
_PIECE = "piece"
_COUNTERS = "counters"
_RANDOM = "random"


class _ThreadedSave(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist format, written by threads.

    megatron-core forks a process per file and keeps a manager process for the results. A fork may hang in a process
    with gloo or CUDA threads, a killed rank leaves the manager running, and a daemonic process may start neither.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=2)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> AsyncRequest:
        filesystem_async._results_queue = (
            queue.Queue()
        )  # megatron-core's planning reads it, and would create one in a manager process
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = request.async_fn.args[0]  # type: ignore[attr-defined]
        return request._replace(async_fn=functools.partial(_write_in_threads, transforms))


def _write_in_threads(transforms: list[Any], rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write each bucket (one file) in a thread; put {bucket: write results} or the exception on `results`."""
    write = filesystem_async.FileSystemWriterAsync.write_preloaded_data
    done: queue.Queue[Any] = queue.Queue()
    tokens: queue.Queue[int] = queue.Queue()  # one for each bucket that is not written
    with ThreadPoolExecutor(max(1, len(buckets))) as threads:
        for number, bucket in enumerate(buckets):
            tokens.put(number)
            threads.submit(write, transforms, number, bucket, done, tokens, use_fsync=True)
    written = dict(done.get_nowait() for _ in buckets)
    failures = [outcome for outcome in written.values() if isinstance(outcome, Exception)]
    results.put(failures[0] if failures else written)


class PendingSave:
    """A checkpoint whose tensors are copied and whose files are being written by a thread of this rank."""

    def __init__(self, request: AsyncRequest, partial: Path, final: Path, live: set[int]) -> None:
        """live: addresses of the storages that training changes while the files are written."""
        self._request, self._partial, self._final = request, partial, final
        self._random_states = _random_states()
        self._failure: BaseException | None = None
        arguments = list(request.async_fn_args)
        if request.async_fn is not None:
            # Live tensors are copied, because training would change them during the write. Tensors of the distributed
            # optimizer were gathered for this checkpoint only: a copy would waste 12 bytes of host memory a parameter.
            arguments[1] = [
                (file, key, (data, [(item, _host_copy(tensor, live)) for item, tensor in tensors]))
                for file, key, (data, tensors) in arguments[1]
            ]
        self._thread = threading.Thread(target=self._write, args=(arguments,), name="checkpoint-writer")
        self._thread.start()

    def _write(self, arguments: list[Any]) -> None:
        try:
            torch.save(self._random_states, self._partial / _RANDOM / _random_file())
            if self._request.async_fn is not None:
                self._request.async_fn(*arguments)
        except BaseException as error:
            self._failure = error

    def finish(self) -> None:
        """Wait for the files and rename the directory to its final name; collective. Raises NotWritten."""
        self._thread.join()
        failed = torch.tensor([int(self._failure is not None)])
        dist.all_reduce(failed)  # of a CPU tensor: the world group has a gloo backend also on CUDA
        if int(failed):
            raise not_written(self._final) from self._failure
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except CheckpointException as error:  # torch's writer does not tell a full disk from other faults
            raise not_written(self._final) from error
        dist.barrier()
        if dist.get_rank() == 0:
            replace_directory(self._partial, self._final)
        dist.barrier()


def _host_copy(tensor: torch.Tensor, live: set[int]) -> torch.Tensor:
    """A host copy of the tensor; the tensor itself when it is on the host and not live."""
    if not tensor.is_cpu:
        return tensor.cpu()
    return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor


def _live_storages(chunks: list[Any], optimizer: Any) -> set[int]:
    """Addresses of the storages that hold weights, master weights and moments."""
    models = [unwrap(chunk) for chunk in chunks]
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
            tensors += [t for state in part.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def replace_directory(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`. The previous `final` is deleted only after the rename."""
    previous = final.with_name(final.name + ".old")
    shutil.rmtree(previous, ignore_errors=True)
    if final.exists():
        final.rename(previous)
    partial.rename(final)
    shutil.rmtree(previous, ignore_errors=True)


def _sharded_state(chunks: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        whole = unwrap(chunk).sharded_state_dict(metadata=dict(_METADATA))
        # TransformerEngine's scaling factors of FP8, empty here, are left out: a run may go on without it, and with it.
        state[_model_key(chunks, number)] = {name: tensor for name, tensor in whole.items() if "_extra_state" not in name}
    begin_torch_adam(optimizer)
    with gathered_by(shapes if loading else gather, optimizer):
        state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=dict(_METADATA))
    return state


def _model_key(chunks: list[Any], number: int) -> str:
    return "model" if len(chunks) == 1 else f"model{number}"


def start_save(directory: str | Path, chunks: list[Any], optimizer: Any, counters: dict[str, Any]) -> PendingSave:
    """Copy model and optimizer state and start writing; collective. `PendingSave.finish` makes the directory appear.

    A kill at any moment leaves the old directory, the new directory, or the old one renamed to "{name}.old".
    """
    final = Path(directory)
    partial = final.with_name(final.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        with writing(partial):
            (partial / _RANDOM).mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, loading=False)
    state[_COUNTERS] = counters
    live = _live_storages(chunks, optimizer)
    apply_factories(state)  # a part of it, split here, can be copied before the next one is
    copy_views(state["optimizer"], live)
    request = dist_checkpointing.save(
        state, str(partial), _ThreadedSave(), async_sharded_save=True, content_metadata=dict(_METADATA)
    )
    assert request is not None
    return PendingSave(request, partial, final, live)


def read_counters(directory: str | Path) -> dict[str, Any]:
    """The `counters` given to `start_save`. Local. Raises ValueError when the directory is not a complete checkpoint."""
    path = Path(directory)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ValueError(f"{path} is not a complete checkpoint: choose another global_step_N by runner.resume_dir")
    counters = dist_checkpointing.load_common_state_dict(str(path))[_COUNTERS]
    assert isinstance(counters, dict)
    return counters


def checkpoint_format(actor: ActorSettings) -> dict[str, Any]:
    """Settings that determine the format of a checkpoint; the parallel layout is not among them."""
    return {
        "actor.model.precision": actor.model.precision,
        "actor.optim.use_distributed_optimizer": actor.optim.use_distributed_optimizer,
    }


def check_format(directory: str | Path, counters: dict[str, Any], actor: ActorSettings) -> None:
    """Raises ValueError when the checkpoint was saved under settings that give it another format (`checkpoint_format`)."""
    form = checkpoint_format(actor)
    for key, saved in counters["form"].items():
        if saved != form[key]:
            raise ValueError(
                f"{directory} was saved with {key}={saved}, this run has {form[key]}: set {key}={saved}, "
                "or begin from the exported model with a fresh optimizer"
            )


@contextlib.contextmanager
def _metadata_read_once(path: Path) -> Iterator[Path]:
    """megatron-core would read the metadata of all tensors for each piece: minutes for a model of many experts."""
    reader, plain = CachedMetadataFileSystemReader(path), torch_strategy._get_filesystem_reader
    torch_strategy._get_filesystem_reader = lambda *_, **__: reader
    try:
        yield path
    finally:
        torch_strategy._get_filesystem_reader = plain


def load(directory: str | Path, chunks: list[Any], optimizer: Any) -> None:
    """Restore model and optimizer in place, piece by piece; collective.

    A rank reads the optimizer state of those parameters of which it updates a part. Raises ValueError when the optimizer
    state does not match the weights. Random states are restored only when the number of ranks is that of the save.
    """
    with _metadata_read_once(Path(directory)) as path:
        for part in optimizer.chained_optimizers:  # TransformerEngine's own load copies all moments, 8 bytes a parameter
            if type(part.optimizer).__module__.startswith("transformer_engine."):
                part.optimizer.load_state_dict = functools.partial(torch.optim.Optimizer.load_state_dict, part.optimizer)
        state = _sharded_state(chunks, optimizer, loading=True)
        for number, chunk in enumerate(chunks):
            weights = state.pop(_model_key(chunks, number))
            _load_in_pieces(path, [(functools.partial(_put_weight, chunk, name), w) for name, w in weights.items()])
        held = take_held_states(optimizer, state["optimizer"])
        optimizer.load_state_dict(dist_checkpointing.load(state, str(path))["optimizer"])
        separate_steps(optimizer)
        _load_in_pieces(path, held)
        check_state_fits_weights(str(path), chunks, optimizer)
        file = path / _RANDOM / _random_file()
        if file.exists():
            _restore_random_states(torch.load(file, weights_only=False))


def _put_weight(chunk: Any, name: str, weight: Any) -> None:
    unwrap(chunk).load_state_dict({name: weight}, strict=False)


def _load_in_pieces(path: Path, items: Iterable[tuple[PutState, Any]]) -> None:
    """Read the tensors of each item and pass them to its function; collective.

    Ranks may read different items, but the same number of pieces, because the read of a piece is collective. megatron-core's
    check that all ranks together read everything exactly once does not apply to a piece.
    """
    pieces: list[list[tuple[PutState, Any]]] = []
    size = 0
    for together in _inseparable(items):
        more = sum(_bytes_to_read(tensor) for _, tensors in together for tensor in nested_values([tensors]))
        if not pieces or size + more > LOAD_PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1] += together
        size += more
    count = torch.tensor([len(pieces)])
    dist.all_reduce(count, dist.ReduceOp.MAX)
    pieces += [[] for _ in range(int(count) - len(pieces))]
    for piece in pieces:
        wanted = {str(n): dict_list_map_outplace(_with_memory, tensors) for n, (_, tensors) in enumerate(piece)}
        read = dist_checkpointing.load({_PIECE: wanted}, str(path), validate_access_integrity=False)
        del wanted
        for n, (put, _) in enumerate(piece):
            put(read[_PIECE].pop(str(n)))


def _inseparable(items: Iterable[tuple[PutState, Any]]) -> list[list[tuple[PutState, Any]]]:
    """Items that one piece must hold together.

    megatron-core gives the layers of one key a common tensor. It takes layers that are not read for another rank's, so a
    single rank reads all layers of a key in one piece.
    """
    if dist.get_world_size() > 1:
        return [[item] for item in items]
    by_keys: dict[tuple[str, ...], list[tuple[PutState, Any]]] = {}
    for item in items:
        keys = tuple(getattr(tensor, "key", "") for tensor in nested_values([item[1]]))
        by_keys.setdefault(keys, []).append(item)
    return list(by_keys.values())


def _bytes_to_read(tensor: Any) -> int:
    """Bytes to hold while this is read. megatron-core joins what a factory has split into a second copy."""
    if not torch.is_tensor(getattr(tensor, "data", None)):
        return 0
    split, here = isinstance(tensor, ShardedTensorFactory), tensor.data.is_meta
    return int(tensor.data.nbytes) * (split + here)


def _with_memory(tensor: Any) -> Any:
    if torch.is_tensor(getattr(tensor, "data", None)) and tensor.data.is_meta:
        return replace(tensor, data=torch.empty_like(tensor.data, device="cpu"))
    return tensor


def _random_file() -> str:
    return f"{dist.get_rank()}of{dist.get_world_size()}.pt"


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
