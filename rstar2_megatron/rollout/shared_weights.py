"""Hands weights to another process of the same node in anonymous shared memory.

A memfd holds one safetensors file; the other process opens it as /proc/PID/fd/N. Nothing has a name in a file
system, so nothing is left behind when either side dies, and a small /dev/shm (64 MB in many containers) does not
matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
from safetensors.torch import save
from torch import Tensor


class SharedBucket:
    """Some tensors in one memfd. Close it when the other side has read it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        data = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
        self.num_bytes = len(data)
        self._fd = os.memfd_create("rstar2-weights", os.MFD_CLOEXEC)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    @property
    def path(self) -> str:
        """Where a process of the same user on this node finds the safetensors file."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def into_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[tuple[SharedBucket, bool]]:
    """Group a stream of tensors into buckets of about `max_bytes`; the flag marks the last one.

    A tensor larger than that makes a bucket of its own. Consumes the stream as it goes, one bucket ahead, so that
    only two buckets are in memory. Raises ValueError for an empty stream.
    """
    waiting: SharedBucket | None = None
    current: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if current and size + num_bytes > max_bytes:
            if waiting is not None:
                yield waiting, False
            waiting, current, size = SharedBucket(current), {}, 0
        # a caller may reuse one buffer for every tensor it streams
        current[name] = tensor.detach().to(device="cpu", memory_format=torch.contiguous_format, copy=True)
        size += num_bytes
    if not current:
        raise ValueError("no weights to send: the stream of named tensors is empty")
    if waiting is not None:
        yield waiting, False
    yield SharedBucket(current), True
