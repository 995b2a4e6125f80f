"""Passes weights to another process of the same node in anonymous shared memory, or in files.

A bucket is one safetensors file in a memfd, which the other process opens as /proc/PID/fd/N. A memfd has no name in a file
system, so nothing is left behind when either process dies. It also does not use /dev/shm, which has 64 MB in many
containers. With a path the same bytes go to an ordinary file.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


class WeightBucket(Protocol):
    """Tensors that an engine can load. `load` returns the message for the engine's process."""

    num_bytes: int
    keepable: bool
    """Whether the data outlives the sender's next step, so that a restarted engine can load it."""

    def load(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class SharedBucket:
    """Tensors in one memfd (or in the file `path`). Close it when the other process has opened it."""

    keepable = True

    def __init__(self, tensors: dict[str, Tensor], path: Path | None = None) -> None:
        header, offsets, self.num_bytes = _layout(tensors)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._fd = os.memfd_create("rstar2-weights", os.MFD_CLOEXEC) if path is None else os.open(path, flags)
        self._file = path
        os.truncate(self._fd, self.num_bytes)
        with mmap.mmap(self._fd, self.num_bytes) as memory:
            memory[: len(header)] = header
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for name, tensor in tensors.items():
                # Copied directly from its device, without an intermediate copy of the bucket.
                end = offsets[name] + tensor.nbytes
                whole[offsets[name] : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            del whole  # otherwise the memory cannot be unmapped

    @property
    def path(self) -> str:
        """Path of the file for a process of the same user, on this node or with the same file system."""
        return f"/proc/{os.getpid()}/fd/{self._fd}" if self._file is None else str(self._file)

    def load(self) -> dict[str, Any]:
        return {"path": self.path}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._file is not None:
                self._file.unlink(missing_ok=True)


class OpenedBucket:
    """An opened bucket of another process. It stays readable when that process closes it or ends."""

    keepable = True

    def __init__(self, path: str) -> None:
        """Raises OSError when the path cannot be read (another node, user or container)."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self._fd).st_size

    def load(self) -> dict[str, Any]:
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _layout(tensors: dict[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Header of a safetensors file, offset of each tensor in the file, size of the file in bytes."""
    entries: dict[str, Any] = {}
    place = 0
    # Wide types first, so that every tensor is aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + entry["data_offsets"][0] for name, entry in entries.items()}
    return struct.pack("<Q", len(text)) + text, offsets, start + place


def group_tensors(named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Group a stream of tensors into dicts of at most `max_bytes`. The flag marks the last group.

    A larger tensor forms its own group. Tensors are copied on their device, because the stream may reuse one buffer for
    all of them. The stream is consumed one group ahead. Raises ValueError for an empty stream.
    """
    waiting: dict[str, Tensor] = {}
    current: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if current and size + tensor.nbytes > max_bytes:
            if waiting:
                yield waiting, False
            waiting, current, size = current, {}, 0
        current[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if not current:
        raise ValueError("no weights to send: the stream of named tensors is empty")
    if waiting:
        yield waiting, False
    yield current, True
