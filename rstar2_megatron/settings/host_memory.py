"""Memory that this process and its children may take: the machine's, or what a control group around them leaves.

A container or a job of Slurm has such a group. The kernel ends a process of it that goes beyond the limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

_OWN = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Bytes."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def available_memory() -> int:
    """Bytes that can be taken without swapping, or being ended; caches of files count as free."""
    return min([psutil.virtual_memory().available, *(max(limit - taken, 0) for limit, taken in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, what is taken of it) of each control group around this process, of version 2 or 1."""
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = _MOUNT / controllers
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            group = root / path.lstrip("/")  # in a container it may be a path of the host: then the root is the container's
            for place in (place for place in (group, *group.parents) if place.is_relative_to(root)):
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    limit, taken = (int((place / name).read_text()) for name in names)
                    counts = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                    caches = counts.get("total_inactive_file", counts.get("inactive_file", 0))  # the first is version 1's
                    yield limit, taken - int(caches)
