"""A call's processes as /proc shows them, and the demotion of calls that use much CPU.

A multilevel feedback queue on top of the kernel's scheduler: the more CPU time a call has used, the smaller its share of a
busy machine, so that endless loops get what short calls leave.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

SLICE_S = 0.1  # CPU time after which a call is demoted
# (CPU seconds used, niceness from there on): the share of a core halves whenever the use has doubled.
DEMOTIONS = ((SLICE_S, 10), (0.2, 13), (0.4, 16), (0.8, 19))
_FIRST_LOOK_S = 0.01  # most calls have ended by then
_NEXT_LOOK_S = 0.02  # until the call is demoted
_LATER_LOOK_S = 0.1
_LAST_LOOK_S = 0.5  # at the highest niceness: only for children that it starts
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> bytes:
    """Read a small file of /proc, at a third of the cost of open()."""
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
    """Yield a process and its descendants, parents first."""
    stack = [pid]
    while stack:
        current = stack.pop()
        yield current
        with contextlib.suppress(OSError):
            stack += children(current)


def end_group(pid: int) -> None:
    """Kill a process and its process group. A process that has ended is no error."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process. Raises OSError when it has ended."""
    return int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES


class Usage(NamedTuple):
    """State and CPU time of a call's processes."""

    members: list[int]
    is_running: bool  # whether one of them uses or waits for a core
    cpu_s: float  # with that of reaped children


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
    """Name of the autogroup of this process's session; empty where the kernel has made none."""
    with contextlib.suppress(OSError):
        return b"".join(_read("/proc/self/autogroup").split()[:1])
    return b""


def weigh_as(sessions: int) -> None:
    """Give this process's session the scheduling weight of `sessions` ones (root only): one step of niceness is a factor of
    1.25.
    """
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(max(-20, -round(math.log(sessions, 1.25)))))


def make_nice(pid: int, niceness: int, own_group: bytes) -> None:
    """Set the niceness of a process, and of its session when it is not the sandbox's own.

    The kernel may weigh sessions (autogroup): a program could otherwise escape its demotion in a new session.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):
        # one descriptor for read and write: between two opens the id may go to another process
        fd = os.open(f"/proc/{pid}/autogroup", os.O_RDWR | os.O_CLOEXEC)
        try:
            group = os.read(fd, 256).split()[:1]  # empty where the session has no autogroup
            if group and group[0] != own_group:
                os.write(fd, str(niceness).encode())
        finally:
            os.close(fd)


class Supervision:
    """Looks at one running call from time to time and demotes it. Times are monotonic seconds."""

    def __init__(
        self, find_pid: Callable[[], int], started: float, own_group: bytes, on_demotion: Callable[[], None]
    ) -> None:
        """`find_pid` is called at the first look; most calls end before it. `on_demotion` is called once, when the call
        sleeps, waits, or has used its slice of CPU: another call may begin."""
        self.find_pid = find_pid
        self.own_group = own_group
        self.on_demotion = on_demotion
        self.used_before_s = 0.0  # CPU time of a session's earlier calls
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
        if niceness:  # includes processes that were started since the last look
            for member in usage.members:
                make_nice(member, niceness, self.own_group)
        self.niceness = niceness
        if not self._is_demoted:
            self.next_look = now + _NEXT_LOOK_S
        elif niceness < DEMOTIONS[-1][1]:
            self.next_look = now + _LATER_LOOK_S
        else:
            self.next_look = now + _LAST_LOOK_S
