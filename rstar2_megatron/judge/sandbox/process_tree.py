"""A call's processes as /proc shows them, its demotion, and the end of its time.

docs/judge.md ("One call") tells when a call is demoted, and when it ends at its time limit. Waits for a core count for nothing:
with one core for eight calls each has its CPU time by five times the limit.

Sleep is estimated: looks come at random times, and each tells of the time since the last. The kernel's account of waits
(`schedstat`) would blame a call for waits of children that end between two looks, and for time that the machine's host takes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rstar2_megatron.judge.limits import WALL_FACTOR
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.sandbox import linux
from rstar2_megatron.judge.sandbox.cgroup import CpuShare, SlotGroup

SLICE_S = 0.03  # CPU time after which a call is demoted
_PERMIT_S = 0.1  # wall time after which another call may begin: a call that gets so little CPU must not hold others back
# Of a demoted call, where there are no CPU groups: its share of a core is a quarter, as that of a demoted group.
NICENESS = 6
_FIRST_LOOK_S = 0.01  # most calls have ended by then
_NEXT_LOOK_S = 0.02  # until the call is demoted
_LATER_LOOK_S = 0.25
_CPU_SHARE, _OWN_SHARE = 0.6, 0.9  # of the limit: CPU time, and CPU time with sleep, that end a call
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


def parent_of(pid: int) -> int:
    """Parent of a process or thread. Raises OSError when it has ended."""
    return int(_stat(f"/proc/{pid}")[1])


def family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants, parents first."""
    stack = [pid]
    while stack:
        current = stack.pop()
        yield current
        with contextlib.suppress(OSError):
            stack += children(current)


def leave_priority() -> None:
    """In a process of a call: no higher priority than others have, which the service's own processes may have."""
    niceness = max(0, os.getpriority(os.PRIO_PROCESS, 0))
    try:
        linux.set_slice(linux.USUAL_SLICE, niceness)
    except OSError:  # a container's filter may refuse it
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


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
    cpu_s: float  # with that of reaped children
    is_running: bool  # a thread uses a core, or waits for one; or the program has ended, and its parent waits for one


def _stat(path: str) -> list[bytes]:
    """The fields of a process or thread from its state on."""
    return _read(f"{path}/stat").rpartition(b")")[2].split()


def usage_of(pid: int) -> Usage:
    members, ticks, is_running = [], 0, False
    for member in family(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat(f"/proc/{member}")
            tasks = os.listdir(f"/proc/{member}/task")
            states = (_stat(f"/proc/{member}/task/{task}")[0] for task in tasks)
            has_ended = member == pid and fields[0] == b"Z" and len(tasks) == 1  # not only its first thread
            is_running = is_running or has_ended or fields[0] == b"R" or (len(tasks) > 1 and b"R" in states)
            ticks += sum(map(int, fields[11:15]))  # own and waited-for children's, user and system
            members.append(member)
    return Usage(members, ticks / _TICKS_PER_S, is_running or not members)


class Supervision:
    """Looks at one running call from time to time, demotes it, and tells when its time is over.

    Times are monotonic seconds.
    """

    def __init__(
        self,
        find_pid: Callable[[], int],
        started: float,
        limit_s: float,
        group: SlotGroup | None,
        on_demotion: Callable[[], None],
        cpu_before_s: float = 0.0,
        usage: Callable[[int], Usage] = usage_of,
    ) -> None:
        """`find_pid` is called at the first look; most calls end before it. `on_demotion` is called once, when the call
        sleeps, has run for `_PERMIT_S`, or has used its slice of CPU: another call may begin. `cpu_before_s`: used by a
        session's earlier calls."""
        self.find_pid = find_pid
        self.usage = usage
        self.started = started
        self.limit_s = limit_s
        self.group = group
        self.on_demotion = on_demotion
        self.next_look = started + _FIRST_LOOK_S
        self.deadline = started + limit_s
        self.niceness = 0
        self.cpu_s = self.slept_s = 0.0
        self._cpu_before_s = cpu_before_s
        self._last_look = started
        self._is_demoted = False

    def look(self, now: float) -> None:
        usage = self.usage(self.find_pid())
        self.cpu_s = usage.cpu_s - self._cpu_before_s
        if not usage.is_running:  # what a late look tells is not true of all the time before it
            self.slept_s += min(now - self._last_look, 2 * _LATER_LOOK_S)
        self._last_look = now
        is_late = now - self.started >= _PERMIT_S
        if not self._is_demoted and (self.cpu_s >= SLICE_S or is_late or not usage.is_running):
            self._is_demoted = True
            self.on_demotion()
        if self.cpu_s >= SLICE_S:
            self.niceness = NICENESS
            has_enough = self.cpu_s * WALL_FACTOR >= now - self.started
            share = CpuShare.IDLE if has_enough else CpuShare.DEMOTED
            if self.group is None or not self.group.set_share(share):
                for member in usage.members:  # includes processes that were started since the last look
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, member, NICENESS)
        usual_s = _LATER_LOOK_S if self.niceness else _NEXT_LOOK_S
        self.next_look = now + usual_s * random.uniform(0.5, 1.5)

    def promote(self, share: CpuShare) -> None:
        """At the limit of a call, and at the end of a session's: undo its demotion. Without CPU groups that needs root."""
        has_cpu_group = self.group is not None and self.group.set_share(share)
        if self.niceness and not has_cpu_group:
            for member in family(self.find_pid()):
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, member, 0)

    def verdict(self, now: float) -> Outcome | None:
        """At the deadline: TIMEOUT; QUEUE_TIMEOUT when the machine gave the call too little CPU; None: a later deadline."""
        self.look(now)
        passed = now - self.started
        missing_s = min(_CPU_SHARE * self.limit_s, _OWN_SHARE * self.limit_s - self.slept_s) - self.cpu_s
        if missing_s <= 0:
            return Outcome.TIMEOUT
        if passed >= WALL_FACTOR * self.limit_s:
            return Outcome.QUEUE_TIMEOUT
        self.deadline = min(now + max(missing_s, 0.01), self.started + WALL_FACTOR * self.limit_s)
        return None

    def starved(self, cost_s: float) -> str:
        """What is told of a call that ended as QUEUE_TIMEOUT by `verdict`."""
        return f"the machine is too busy: it gave this call {self.cpu_s:.1f} s of CPU in {cost_s:.0f} s\n"
