"""Sends weights from an actor to an engine on the same GPU by CUDA IPC: the engine reads the actor's buffer in place.

The message holds the buffer's IPC handle and the position of each tensor in it. A buffer in host memory is shared by its file
descriptor instead; the tests run that way. Sharing device memory itself is untested: no GPU was available.
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

from rstar2_megatron.weights.bucket import Bucket

_DEVICE_ARGUMENT = 6  # storage_device among the arguments of torch's rebuild_cuda_tensor


@dataclass(slots=True)
class DeviceBucket:
    """A bucket in device memory, on the rollout worker: one handle per tensor-parallel rank of the engine."""

    handles: list[bytes]
    num_bytes: int
    keepable: bool = False  # the actor reuses the buffer

    def load(self) -> dict[str, Any]:
        return {"handles": self.handles}

    def close(self) -> None:
        """Does nothing: the actor owns the memory."""


def handle_of(bucket: Bucket) -> bytes:
    """Message by which another process on the same GPU reads the buffer. Keep the buffer until that process has finished."""
    if bucket.data.device.type == "cpu":
        descriptor, size = bucket.data.untyped_storage()._share_fd_cpu_()
        return pickle.dumps((f"/proc/{os.getpid()}/fd/{descriptor}", size, bucket.places))
    torch.cuda.synchronize()  # the copies into the buffer must end before the other process reads it
    rebuild, arguments = reduce_tensor(bucket.data)
    return bytes(ForkingPickler.dumps((rebuild, arguments, bucket.places)))


def open_device_bucket(handle: bytes) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a handle, in the actor's memory, on the current device of this process."""
    rebuild, arguments, places = pickle.loads(handle)
    if isinstance(rebuild, str):
        yield from Bucket(torch.from_file(rebuild, True, arguments, dtype=torch.uint8), places).tensors()
        return
    # CUDA_VISIBLE_DEVICES differs between processes, so the actor's device number is not valid here.
    arguments = list(arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    yield from Bucket(rebuild(*arguments), places).tensors()
    torch.cuda.synchronize()  # the engine's copies must end before the actor gets the answer
