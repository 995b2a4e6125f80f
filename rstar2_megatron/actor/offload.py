"""Moves weights, gradients and optimizer state to host memory, so that an engine can use the GPU between training steps.

The host memory is allocated once and reused each step. With a GPU it is pinned, so that copies run at the link's rate. On a
CPU the same copies are made into other host memory, so that tests run the same sequence of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

# Bytes of a slab: a power of two, because torch rounds pinned allocations up to one, which may waste up to half of them.
_SLAB = 1 << 28


class HostSlabs:
    """Host memory for the bytes of a list of tensors, one after the other. It grows and is never freed."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []

    def pieces(self, sizes: list[int]) -> Iterator[list[tuple[slice, Tensor]]]:
        """For each size, in order: the ranges of bytes and the uint8 host memory of each range."""
        position = 0
        for size in sizes:
            found = []
            done = 0
            while done < size:
                number, offset = divmod(position, _SLAB)
                length = min(size - done, _SLAB - offset)
                if number == len(self._slabs):
                    pinned = torch.cuda.is_available()
                    self._slabs.append(torch.empty(_SLAB, dtype=torch.uint8, pin_memory=pinned))
                found.append((slice(done, done + length), self._slabs[number][offset : offset + length]))
                done += length
                position += length
            yield found


class DeviceMemory:
    """Moves the parts of one rank ("weights", "grads", "state") between device and host.

    Tensor objects stay the same; their storages are resized to 0 and back. Gradient buffers are not copied, because they
    are zeroed before their next use.
    """

    def __init__(self, *, masters: bool) -> None:
        """masters: fp32 master weights are separate tensors (bf16 training), moved as part of the state.

        In fp32 training the weights are the masters.
        """
        self._masters = masters
        self._slabs = {"weights": HostSlabs(), "state": HostSlabs()}
        self._sizes: dict[str, list[int]] = {}
        self._stream: torch.cuda.Stream | None = None  # made at its first use: it creates the CUDA context

    def offload(self, chunks: list[Any], optimizer: Any, parts: set[str]) -> None:
        """Copy `parts` to the host and free their device memory."""
        torch.cuda.synchronize()
        for buffer in _buffers(chunks):
            buffer.offload_to_cpu(move_params=False, move_grads="grads" in parts)
        for part in sorted(parts & self._slabs.keys()):
            storages = self._storages(part, chunks, optimizer)
            self._sizes[part] = [storage.nbytes() for storage in storages]
            self._copy(part, storages, to_host=True)
            for storage in storages:
                storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def reload(self, chunks: list[Any], optimizer: Any, parts: set[str]) -> None:
        """Copy `parts` back to the device."""
        for buffer in _buffers(chunks):
            buffer.reload_from_cpu(move_params=False, move_grads="grads" in parts)
        for part in sorted(parts & self._slabs.keys()):
            storages = self._storages(part, chunks, optimizer)
            for storage, size in zip(storages, self._sizes[part], strict=True):
                storage.resize_(size)
            self._copy(part, storages, to_host=False)
        torch.cuda.synchronize()

    def _storages(self, part: str, chunks: list[Any], optimizer: Any) -> list[torch.UntypedStorage]:
        """The distinct storages of a part, in the same order at every call."""
        weights = _unique(buffer.param_data for buffer in _buffers(chunks) if buffer.param_data is not None)
        if part == "weights":
            return list(weights.values())
        state = _unique(self._state(optimizer))
        return [storage for address, storage in state.items() if address not in weights]

    def _state(self, optimizer: Any) -> Iterator[Tensor]:
        for inner in optimizer.chained_optimizers:
            if inner.optimizer is None:  # nothing to train on this rank
                continue
            for state in inner.optimizer.state.values():
                # torch's Adam needs its step counter, a 0-dim tensor, on the host.
                yield from (value for value in state.values() if torch.is_tensor(value) and value.ndim)
            if self._masters:
                for group in inner.optimizer.param_groups:
                    yield from group["params"]

    def _copy(self, part: str, storages: list[torch.UntypedStorage], *, to_host: bool) -> None:
        pieces = self._slabs[part].pieces(self._sizes[part])
        if self._stream is None and torch.cuda.is_available():
            self._stream = torch.cuda.Stream()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for storage, found in zip(storages, pieces, strict=True):
                on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for place, on_host in found:
                    if to_host:
                        on_host.copy_(on_device[place], non_blocking=True)
                    else:
                        on_device[place].copy_(on_host, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def _unique(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct storages of the tensors by address, in order."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


def _buffers(chunks: list[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers
