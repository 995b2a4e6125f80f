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
from pathlib import Path
from typing import Any, Protocol

import torch

from rstar2_megatron.records.disk import writing
from rstar2_megatron.weights.bucket import Bucket, Places

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
    """A copy of a bucket in a memfd (or in the file `path`). Close it when the other process has opened it."""

    keepable = True

    def __init__(self, bucket: Bucket, path: Path | None = None) -> None:
        header = _header(bucket.places)
        self.num_bytes = len(header) + bucket.data.nbytes
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._fd = os.memfd_create("rstar2-weights", os.MFD_CLOEXEC) if path is None else os.open(path, flags)
        self._file = path
        if path is None:
            os.truncate(self._fd, self.num_bytes)
        else:
            with writing(path):  # now: on a full disk a write to mapped memory ends the process
                os.posix_fallocate(self._fd, 0, self.num_bytes)
        with mmap.mmap(self._fd, self.num_bytes) as memory:
            memory[: len(header)] = header
            # The view lives for this line only, because mapped memory that is in use cannot be unmapped.
            torch.frombuffer(memory, dtype=torch.uint8, offset=len(header)).copy_(bucket.data)

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


def _header(places: Places) -> bytes:
    """The header of a safetensors file with these tensors."""
    entries = {
        name: {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + torch.Size(shape).numel() * dtype.itemsize],
        }
        for name, (offset, shape, dtype) in places.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
