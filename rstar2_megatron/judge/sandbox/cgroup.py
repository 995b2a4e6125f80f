"""A hard memory limit for each slot, where control groups (version 1 or 2) can be made.

memfd and many processes escape an address-space limit; a control group counts their memory too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "rstar2-judge"
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}


def _own_directory() -> tuple[Path, int]:
    """Directory of this process's memory control group, and the hierarchy's version."""
    unified: Path | None = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            unified = Path("/sys/fs/cgroup") / path.lstrip("/")
        elif "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), 1
    if unified is None:
        raise OSError(2, "no memory control group hierarchy")
    return unified, 2


def sweep_stale(parent: Path) -> None:
    """Remove the empty groups of services whose process has ended."""
    for path in parent.glob(f"{_NAME}-*"):
        owner = path.name.rsplit("-", 1)[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove_tree(path)


def _remove_tree(path: Path) -> None:
    for child in [*path.glob("slot-*"), path]:
        with contextlib.suppress(OSError):
            child.rmdir()


class SlotGroup:
    """One slot's group, reached through descriptors that stay valid after the file system is hidden."""

    def __init__(self, directory: Path, version: int) -> None:
        directory.mkdir()
        self._limit = os.open(directory / _LIMIT[version], os.O_WRONLY | os.O_CLOEXEC)
        self._members = os.open(directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        names = ("memory.oom_control", "memory.failcnt") if version == 1 else ("memory.events",)
        self._events = [os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC) for name in names]
        self._size = 0
        if version == 2:
            with contextlib.suppress(OSError):  # absent without swap
                (directory / "memory.swap.max").write_text("0")

    @property
    def descriptors(self) -> set[int]:
        return {self._limit, self._members, *self._events}

    def join(self) -> None:
        """Move the calling process into the group; its later children are in it too."""
        os.write(self._members, b"0")

    def set_limit(self, size: int) -> None:
        """Set the limit in bytes of the whole group. For one process only: it remembers the last value."""
        if size != self._size:
            os.write(self._limit, str(size).encode())
            self._size = size

    def shortage(self) -> tuple[int, int]:
        """How many of its processes the kernel has killed for lack of memory, and how often this group's limit was reached."""
        words = b" ".join([os.pread(fd, 4096, 0) for fd in self._events]).split()
        told = dict(zip(words[::2], words[1::2], strict=False))
        reached = told.get(b"max", words[-1])  # version 1: the other file's only number
        return int(told.get(b"oom_kill", 0)), int(reached)


class GroupTree:
    """The groups of one service: a parent and one group a slot."""

    def __init__(self, slots: int) -> None:
        """Raises OSError where control groups cannot be made."""
        base, version = _own_directory()
        sweep_stale(base)
        self.root = base / f"{_NAME}-{os.getpid()}"
        self.root.mkdir()
        _bound_service(self.root, version)
        self.slots: list[SlotGroup] = []
        try:
            if version == 2:
                (self.root / "cgroup.subtree_control").write_text("+memory")
            self.slots = [SlotGroup(self.root / f"slot-{index}", version) for index in range(slots)]
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the groups; their processes must have ended."""
        _remove_tree(self.root)


def _bound_service(root: Path, version: int) -> None:
    """Leave a quarter of the memory that this process may use to others: slots promise more than the machine has."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for directory in root.parents:
        with contextlib.suppress(OSError, ValueError):  # no group, or one without a limit
            sizes.append(int((directory / _LIMIT[version]).read_text()))
    (root / _LIMIT[version]).write_text(str(min(sizes) * 3 // 4))
