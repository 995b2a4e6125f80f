"""Control groups (version 1 or 2) of the slots' calls: a hard memory limit, a share of the cores, and a freezer for each slot.

memfd and many processes escape an address-space limit; a memory group counts their memory too. A CPU group weighs all
processes of a call as one. The slots' own processes are in no group: what a call does must not slow its watcher.

Version 2 allows a controller in a group's children only when the group itself has no process. So the processes of this
process's group, other programs' too, move to a child of it, where all its limits still hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
from enum import IntEnum
from pathlib import Path

_NAME = "rstar2-judge"
_OTHERS = "rstar2-judge-others"  # the child group for the processes of a group that must have none
_MOUNT = Path("/sys/fs/cgroup")
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_IDLE = "cpu.idle"
_SHARES = {1: "cpu.shares", 2: "cpu.weight"}
_QUOTA = {1: "cpu.cfs_quota_us", 2: "cpu.max"}
_NO_QUOTA, _PAUSED = {1: b"-1", 2: b"max 100000"}, {1: b"1000", 2: b"1000 100000"}  # 1% of a core
_CONTROLLERS = "cgroup.subtree_control"  # those that the children of a group of version 2 have
_FREEZE = "cgroup.freeze"  # of version 2 only: SIGKILL does not end what the freezer of version 1 has stopped


def _own_directory(controller: str) -> tuple[Path, int]:
    """Directory of this process's control group for a controller, and the hierarchy's version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _MOUNT / controller / path.lstrip("/"), 1
    return own_unified_directory(), 2


def own_unified_directory() -> Path:
    """This process's group of version 2, which is also mounted beside hierarchies of version 1."""
    for mount in (_MOUNT, _MOUNT / "unified"):
        if (mount / "cgroup.controllers").exists():
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                if line.startswith("0::"):
                    own = mount / line[3:].lstrip("/")
                    return own.parent if own.name == _OTHERS else own
    raise OSError(errno.ENOENT, "no control groups of version 2")


def enable(controller: str, directory: Path) -> None:
    """Let the children of a group of version 2 have a controller. Raises OSError."""
    for ancestor in (*reversed(directory.parents), directory):
        try:
            if controller not in (ancestor / _CONTROLLERS).read_text().split():
                (ancestor / _CONTROLLERS).write_text(f"+{controller}")
        except OSError as error:
            if ancestor == directory and error.errno == errno.EBUSY:
                _empty(directory)
                (ancestor / _CONTROLLERS).write_text(f"+{controller}")
            elif ancestor == directory:
                raise


def _empty(directory: Path) -> None:
    """Move the processes of a group to a child of it."""
    others = directory / _OTHERS
    others.mkdir(exist_ok=True)
    for _ in range(10):  # a process may be started while others move
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (others / "cgroup.procs").write_text(pid)


def _remove_tree(path: Path) -> None:
    for child in [*path.glob("slot-*"), path]:
        with contextlib.suppress(OSError):
            child.rmdir()


class CpuShare(IntEnum):
    """What a slot's call gets of the CPU."""

    NO_CALL = 0
    NEW = 1
    DEMOTED = 2  # a quarter of a new call's weight: it is short of CPU, or the kernel has no idle groups
    IDLE = 3  # what others leave; it gives way at once


_WEIGHTS = {CpuShare.NO_CALL: 100, CpuShare.NEW: 100, CpuShare.DEMOTED: 25, CpuShare.IDLE: 0}


class CpuParent:
    """The CPU group of all slots. It weighs as its new calls together, more while a call is short of CPU.

    While all running calls are idle, it is idle too. With a larger weight other processes, the service's own among them, would
    wait for a call until the next tick of the kernel's clock.
    """

    def __init__(self, directory: Path, most: int, slots: int, version: int) -> None:
        """`most`: its largest weight in calls, up to 100, which it has while a call is short of CPU. Raises OSError."""
        self._most, self._slots, self._version = most, slots, version
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # The share of each slot, then the group's weight in calls: a file that the slots' processes share. Whoever dies with
        # its lock loses it.
        self._states = os.memfd_create("shares", os.MFD_CLOEXEC)
        os.truncate(self._states, slots + 1)
        self.descriptors = {self._directory, self._states}
        self.has_idle = (directory / _IDLE).exists()  # Linux 5.15

    def tell(self, slot: int, share: CpuShare) -> None:
        """Record the share of a slot's call. The end of a call changes the group's weight only when all others are idle.

        The next call may be as new as the last: setting the weight at both ends of each would cost 0.15 ms a call.
        """
        os.lockf(self._states, os.F_LOCK, 0)
        try:
            os.pwrite(self._states, bytes((share,)), slot)
            told = os.pread(self._states, self._slots + 1, 0)
            shares, before = told[:-1], told[-1]
            calls = self._most if CpuShare.DEMOTED in shares else min(self._most, shares.count(CpuShare.NEW))
            all_idle = not calls and CpuShare.IDLE in shares
            if calls != before and (all_idle or share is not CpuShare.NO_CALL):
                _set_weight(self._directory, calls * _WEIGHTS[CpuShare.NEW], before, self._version)
                os.pwrite(self._states, bytes((calls,)), self._slots)
        finally:
            os.lockf(self._states, os.F_ULOCK, 0)


class SlotGroup:
    """One slot's group, reached through descriptors that stay valid after the file system is hidden.

    A session has a group too, so there may be thousands: only what each call reads stays open, beside the directories.
    """

    def __init__(self, roots: tuple[Path, Path | None, Path | None], version: int, slot: int, parent: CpuParent | None) -> None:
        """New directories below `roots`: those of memory, CPU and freezer; `version` is that of the first two.

        `parent`: the group of all slots.
        """
        memory, cpu, freezer = (root and root / f"slot-{slot}" for root in roots)
        assert memory is not None
        self.descriptors: set[int] = set() if parent is None else set(parent.descriptors)
        self._version, self._slot, self._parent = version, slot, parent
        self._size = 0
        self._share: CpuShare | None = None
        self._is_paused: bool | None = None
        opened: dict[Path | None, int] = {None: -1}
        for path in (memory, cpu, freezer):  # of version 2 they are one
            if path is not None and path not in opened:
                path.mkdir()
                opened[path] = self._open(path, os.O_DIRECTORY)
        self._directories = [fd for fd in opened.values() if fd >= 0]
        self._memory, self._cpu, self._freezer = opened[memory], opened[cpu], opened[freezer]
        names = ("memory.oom_control", "memory.failcnt") if version == 1 else ("memory.events",)
        self._events = [self._open(memory / name) for name in names]
        if version == 2:
            with contextlib.suppress(OSError):  # absent without swap
                _write(self._memory, "memory.swap.max", b"0")
        self.has_freezer = freezer is not None and (freezer / _FREEZE).exists()  # not before Linux 5.2
        self._has_quota = cpu is not None and (cpu / _QUOTA[version]).exists()

    def _open(self, path: Path, flags: int = 0) -> int:
        fd = os.open(path, flags | os.O_RDONLY | os.O_CLOEXEC)
        self.descriptors.add(fd)
        return fd

    def join(self) -> None:
        """Move the calling process into the group; its later children are in it too."""
        for directory in self._directories:
            _write(directory, "cgroup.procs", b"0")

    def set_limit(self, size: int) -> None:
        """Set the limit in bytes of the whole group. For one process only: it remembers the last value."""
        if size != self._size:
            _write(self._memory, _LIMIT[self._version], str(size).encode())
            self._size = size

    def shortage(self) -> tuple[int, int]:
        """How many of its processes the kernel has killed for lack of memory, and how often this group's limit was reached."""
        words = b" ".join([os.pread(fd, 4096, 0) for fd in self._events]).split()
        told = dict(zip(words[::2], words[1::2], strict=False))
        reached = told.get(b"max", words[-1])  # version 1: the other file's only number
        return int(told.get(b"oom_kill", 0)), int(reached)

    def set_share(self, share: CpuShare) -> bool:
        """Give the group's call a share of the CPU. False without CPU groups; IDLE is DEMOTED where the kernel has none."""
        if self._parent is None:
            return False
        if share is CpuShare.IDLE and not self._parent.has_idle:
            share = CpuShare.DEMOTED
        if share is not self._share:
            before = 0 if self._share is None else _WEIGHTS[self._share]
            if _WEIGHTS[share] != before or self._share is None:
                _set_weight(self._cpu, _WEIGHTS[share], before, self._version)
            self._share = share
            self._parent.tell(self._slot, share)
        return True

    def pause(self, paused: bool = True) -> None:
        """Stop the group's processes, or let them continue; without a freezer, leave them next to no CPU."""
        if paused == self._is_paused:
            return
        if self.has_freezer:
            _write(self._freezer, _FREEZE, b"1" if paused else b"0")
        elif self._has_quota:
            _write(self._cpu, _QUOTA[self._version], (_PAUSED if paused else _NO_QUOTA)[self._version])
        self._is_paused = paused


def _write(directory: int, name: str, value: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)


def _set_weight(directory: int, weight: int, before: int, version: int) -> None:
    """100 is a call's; 0 is idle. An idle group's weight cannot be set, and is the kernel's usual one afterwards."""
    if not (weight and before):
        with contextlib.suppress(FileNotFoundError):
            _write(directory, _IDLE, b"0" if weight else b"1")
    if weight:
        shares = weight if version == 2 else weight * 1024 // 100
        _write(directory, _SHARES[version], str(shares).encode())


class GroupTree:
    """The groups of one service: a parent and one group a slot."""

    def __init__(self, slots: int, most: int) -> None:
        """`most`: the largest weight of all slots together, in calls: about as many as there are permits.

        Raises OSError where no memory groups can be made.
        """
        base, version = _own_directory("memory")
        self.without_cpu: OSError | None = None  # why there are no CPU groups
        self._version = version
        if version == 2:
            enable("memory", base)
        self.roots = [_make_root(base)]
        try:
            if version == 2:
                enable("memory", self.roots[0])
            _share_memory(base, version)
            cpu = parent = None
            try:
                cpu = self._cpu_root(version)
                parent = CpuParent(cpu, most, slots, version)
            except OSError as error:
                self.without_cpu = error
            roots = self.roots[0], cpu if parent else None, self._freezer_root(version)
            self.slots = [SlotGroup(roots, version, slot, parent) for slot in range(slots)]
        except OSError:
            self.remove()
            raise

    def _cpu_root(self, memory_version: int) -> Path:
        if memory_version == 2:
            for directory in (self.roots[0].parent, self.roots[0]):
                enable("cpu", directory)
            return self.roots[0]
        base, version = _own_directory("cpu")
        if version != 1:
            raise OSError(errno.EOPNOTSUPP, "memory groups are of version 1, CPU groups of version 2")
        self.roots.append(_make_root(base))
        return self.roots[-1]

    def _freezer_root(self, memory_version: int) -> Path | None:
        if memory_version == 1:
            try:
                self.roots.append(_make_root(own_unified_directory()))
            except OSError:
                return None
        return self.roots[-1]

    def remove(self) -> None:
        """Remove the groups; their processes must have ended."""
        for root in self.roots:
            _remove_tree(root)
        _share_memory(self.roots[0].parent, self._version)


def _make_root(base: Path) -> Path:
    for path in base.glob(f"{_NAME}-*"):  # the empty groups of services whose process has ended
        owner = path.name.rsplit("-", 1)[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove_tree(path)
    root = base / f"{_NAME}-{os.getpid()}"
    root.mkdir()
    return root


def _share_memory(base: Path, version: int) -> None:
    """All workers below `base` together leave a quarter of the memory to others: slots promise more than the machine has."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for directory in (base, *base.parents):
        with contextlib.suppress(OSError, ValueError):  # no group, or one without a limit
            sizes.append(int((directory / _LIMIT[version]).read_text()))
    roots = list(base.glob(f"{_NAME}-*"))
    for root in roots:
        with contextlib.suppress(OSError):  # it has just ended
            (root / _LIMIT[version]).write_text(str(min(sizes) * 3 // 4 // len(roots)))
