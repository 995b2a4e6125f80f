"""A call's processes as the kernel shows them, and how a call that uses much CPU is made to step back.

A multilevel feedback queue on top of the kernel's scheduler: the more CPU time a call has used, the less of a busy
machine it gets, so that endless loops take what short calls leave.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

SLICE_S = 0.1  # CPU time after which a call no longer counts as a short one
# CPU seconds used, niceness from there on: three steps halve the share of a core, each time that the use has doubled.
DEMOTIONS = ((SLICE_S, 10), (0.2, 13), (0.4, 16), (0.8, 19))
_FIRST_LOOK_S = 0.01  # most calls have ended by then
_NEXT_LOOK_S = 0.02  # while the call may hold others up
_LATER_LOOK_S = 0.1
_LAST_LOOK_S = 0.5  # nothing left to take from it, except for children that it starts
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> bytes:
    """A small file of /proc; a third of the cost of open()."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def children(pid: int) -> list[int]:
    """Direct children of all threads of a process. Raises OSError when it has ended."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return found


def family(pid: int) -> Iterator[int]:
    """A process and its descendants, parents first."""
    stack = [pid]
    while stack:
        current = stack.pop()
        yield current
        with contextlib.suppress(OSError):
            stack += children(current)


def end_group(pid: int) -> None:
    """End a process and its process group. Nothing happens to one that has ended."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Raises OSError when the process has ended."""
    return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES


class Usage(NamedTuple):
    """What a call's processes do and have used."""

    members: list[int]
    is_running: bool  # one of them is on a core or waits for one
    cpu_s: float  # ended children that were waited for included


def usage_of(pid: int) -> Usage:
    members, is_running, ticks = [], False, 0
    for member in family(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _read(f"/proc/{member}/stat").rpartition(b")")[2].split()
            members.append(member)
            is_running |= fields[0] == b"R"
            ticks += sum(map(int, fields[11:15]))  # own and waited-for children's, user and system
    return Usage(members, is_running, ticks / _TICKS_PER_S)


def own_autogroup() -> bytes:
    """Name of the scheduling group that this process's session has; empty where the kernel made none for it."""
    with contextlib.suppress(OSError):
        return b"".join(_read("/proc/self/autogroup").split()[:1])
    return b""


def weigh_as(sessions: int) -> None:
    """Let this process's session weigh as much as so many, beside others of this machine (root only).

    One step of niceness is a factor of 1.25.
    """
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(max(-20, -round(math.log(sessions, 1.25)))))


def make_nice(pid: int, niceness: int, own_group: bytes) -> None:
    """Lower the share of a process; also of its session, if it made one to be weighed apart from the others."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):
        # one descriptor for look and change: the number may be another process's in between
        fd = os.open(f"/proc/{pid}/autogroup", os.O_RDWR | os.O_CLOEXEC)
        try:
            group = os.read(fd, 256).split()[:1]  # nothing where the kernel made none for the session
            if group and group[0] != own_group:
                os.write(fd, str(niceness).encode())
        finally:
            os.close(fd)


class Supervision:
    """Looks at one running call now and then. Times are of the monotonic clock."""

    def __init__(
        self, find_pid: Callable[[], int], started: float, own_group: bytes, on_demotion: Callable[[], None]
    ) -> None:
        """`find_pid` is asked at the first look, which most calls do not live to see. `on_demotion` is called
        once, when the call sleeps or waits, or has used a slice: others may start."""
        self.find_pid = find_pid
        self.own_group = own_group
        self.on_demotion = on_demotion
        self.used_before_s = 0.0  # by a live interpreter in earlier calls
        self.next_look = started + _FIRST_LOOK_S
        self.niceness = 0
        self._is_demoted = False

    def look(self, now: float) -> None:
        usage = usage_of(self.find_pid())
        cpu_s = usage.cpu_s - self.used_before_s
        if not self._is_demoted and (cpu_s >= SLICE_S or not usage.is_running):
            self._is_demoted = True
            self.on_demotion()
        niceness = max((value for used_s, value in DEMOTIONS if cpu_s >= used_s), default=0)
        if niceness:  # also those that were started since the last look
            for member in usage.members:
                make_nice(member, niceness, self.own_group)
        self.niceness = niceness
        if not self._is_demoted:
            self.next_look = now + _NEXT_LOOK_S
        elif niceness < DEMOTIONS[-1][1]:
            self.next_look = now + _LATER_LOOK_S
        else:
            self.next_look = now + _LAST_LOOK_S
