"""Weights from an actor to an engine on the same GPU by CUDA IPC: the engine reads the actor's buffer in place.

The bytes of a bucket lie in one flat buffer; what travels is its IPC handle and where each tensor lies in it.
A buffer in host memory is shared by its file descriptor instead, which is how this route runs in the tests. Sharing
device memory itself has not been run by this project yet: there was no GPU.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

_DEVICE_ARGUMENT = 6  # storage_device among the arguments of torch's rebuild_cuda_tensor


@dataclass(slots=True)
class DeviceBucket:
    """The rollout worker's end: one handle for each tensor-parallel rank of its engine."""

    handles: list[bytes]
    num_bytes: int
    keepable: bool = False  # the actor reuses the buffer

    def load(self) -> dict[str, Any]:
        return {"handles": self.handles}

    def close(self) -> None:
        """Nothing: the memory is the actor's."""


def flatten(tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, tuple[int, tuple[int, ...], torch.dtype]]]:
    """One uint8 buffer on the tensors' device, and (offset, shape, dtype) of each tensor, aligned to 16 bytes."""
    places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
    size = 0
    for name, tensor in tensors.items():
        places[name] = (size, tuple(tensor.shape), tensor.dtype)
        size += -(-tensor.nbytes // 16) * 16
    flat = torch.empty(size, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    for (offset, shape, dtype), tensor in zip(places.values(), tensors.values()):
        flat[offset : offset + tensor.nbytes].view(dtype).view(shape).copy_(tensor)
    return flat, places


def unflatten(
    flat: Tensor, places: dict[str, tuple[int, tuple[int, ...], torch.dtype]]
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of `flatten`, as views."""
    for name, (offset, shape, dtype) in places.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        yield name, flat[offset : offset + num_bytes].view(dtype).view(shape)


def handle_of(flat: Tensor, places: dict[str, Any]) -> bytes:
    """What another process on the same GPU needs to read the buffer; keep it alive until that one is done."""
    if flat.device.type == "cpu":
        descriptor, size = flat.untyped_storage()._share_fd_cpu_()
        return pickle.dumps((f"/proc/{os.getpid()}/fd/{descriptor}", size, places))
    torch.cuda.synchronize()  # the copies into the buffer are done when the other process reads it
    rebuild, arguments = reduce_tensor(flat)
    return bytes(ForkingPickler.dumps((rebuild, arguments, places)))


def open_device_bucket(handle: bytes) -> Iterator[tuple[str, Tensor]]:
    """The named tensors behind a handle, in the actor's memory; on the current device of this process."""
    rebuild, arguments, places = pickle.loads(handle)
    if isinstance(rebuild, str):
        yield from unflatten(torch.from_file(rebuild, True, arguments, dtype=torch.uint8), places)
        return
    # Device numbers are each process's own (CUDA_VISIBLE_DEVICES): the actor's says nothing here.
    arguments = list(arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    yield from unflatten(rebuild(*arguments), places)
    torch.cuda.synchronize()  # the engine's copies are done before the actor hears so
