"""A call's processes as /proc shows them, its demotion, and the end of its time.

A call that has used its slice of CPU is demoted: on a busy machine a call that begins later has the larger share of a core.

Time in which a call waits for a core is not the program's: a call ends at its time limit only when the rest of the time, or
its CPU time, is at least half the limit. With one core for eight calls each has that by four times the limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rstar2_megatron.judge.limits import WALL_FACTOR
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.sandbox.cgroup import SlotGroup

SLICE_S = 0.03  # CPU time after which a call is demoted
_PERMIT_S = 0.1  # wall time after which another call may begin: a call that gets so little CPU must not hold others back
# Of a demoted call, where there are no CPU groups: its share of a core is a quarter, as that of a demoted group.
NICENESS = 6
_FIRST_LOOK_S = 0.01  # most calls have ended by then
_NEXT_LOOK_S = 0.02  # until the call is demoted
_LATER_LOOK_S = 0.25
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


def leave_priority() -> None:
    """In a process of a call: no higher priority than others have, which the service's own processes may have."""
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


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
    # Of each thread: the kernel's account of its CPU time and of its waits for a core (changed when a wait ends, empty where
    # the kernel keeps none), in ns, and whether it uses or waits for a core.
    threads: dict[str, tuple[list[int], bool]]

    @property
    def is_running(self) -> bool:
        return any(running for _, running in self.threads.values())


def _stat(path: str) -> list[bytes]:
    """The fields of a process or thread from its state on."""
    return _read(f"{path}/stat").rpartition(b")")[2].split()


def usage_of(pid: int) -> Usage:
    members, ticks, threads = [], 0, {}
    for member in family(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat(f"/proc/{member}")
            members.append(member)
            ticks += sum(map(int, fields[11:15]))  # own and waited-for children's, user and system
            tasks = os.listdir(f"/proc/{member}/task")
            for task in tasks:
                path = f"/proc/{member}/task/{task}"
                state = (fields if len(tasks) == 1 else _stat(path))[0]
                account: list[int] = []
                with contextlib.suppress(OSError):
                    account = [int(n) for n in _read(f"{path}/schedstat").split()[:2]]
                threads[task] = account, state == b"R"
    return Usage(members, ticks / _TICKS_PER_S, threads)


_NOTHING = Usage([], 0.0, {})


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
        before: Usage = _NOTHING,
    ) -> None:
        """`find_pid` is called at the first look; most calls end before it. `on_demotion` is called once, when the call
        sleeps, waits, has run for `_PERMIT_S`, or has used its slice of CPU: another call may begin. `before`: by a session's
        earlier calls."""
        self.find_pid = find_pid
        self.started = started
        self.limit_s = limit_s
        self.group = group
        self.on_demotion = on_demotion
        self.next_look = started + _FIRST_LOOK_S
        self.deadline = started + limit_s
        self.niceness = 0
        self.cpu_s = 0.0
        self._cpu_before_s = before.cpu_s
        self._accounts = {task: (account, started) for task, (account, _) in before.threads.items()}
        self._waited_before_s = self._waited_s = 0.0
        self._waited_before_s = self._ended_waits_s()
        self._is_demoted = False

    def look(self, now: float) -> None:
        pid = self.find_pid()
        if not self._accounts:  # the first look: a call whose process is not there yet has waited
            self._waited_before_s -= time.monotonic() - now
        usage = usage_of(pid)
        self.cpu_s = usage.cpu_s - self._cpu_before_s
        waiting_s = 0.0  # of the wait that has not ended
        for task, (account, is_running) in usage.threads.items():
            last, since = self._accounts.get(task, ([], now))
            self._accounts[task] = account, since if account == last else now
            if is_running and account and account == last:
                waiting_s = max(waiting_s, now - since)
        self._waited_s = self._ended_waits_s() - self._waited_before_s + waiting_s
        is_late = now - self.started >= _PERMIT_S
        if not self._is_demoted and (self.cpu_s >= SLICE_S or is_late or not usage.is_running):
            self._is_demoted = True
            self.on_demotion()
        if self.cpu_s >= SLICE_S:
            self.niceness = NICENESS
            if self.group is None or not self.group.demote():
                for member in usage.members:  # includes processes that were started since the last look
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, member, NICENESS)
        self.next_look = now + (_LATER_LOOK_S if self.niceness else _NEXT_LOOK_S)

    def _ended_waits_s(self) -> float:
        return sum(account[1] for account, _ in self._accounts.values() if account) / 1e9

    def promote(self) -> None:
        """At the end of a session's call: the next one begins with a full share. Without CPU groups that needs root."""
        if self.niceness and (self.group is None or not self.group.demote(False)):
            for member in family(self.find_pid()):
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, member, 0)

    def verdict(self, now: float) -> Outcome | None:
        """At the deadline: TIMEOUT; QUEUE_TIMEOUT when the machine gave the call too little CPU; None: a later deadline."""
        self.look(now)
        passed = now - self.started
        missing_s = self.limit_s / 2 - max(self.cpu_s, passed - self._waited_s)
        if missing_s <= 0:
            return Outcome.TIMEOUT
        if passed >= WALL_FACTOR * self.limit_s:
            return Outcome.QUEUE_TIMEOUT
        self.deadline = min(now + max(missing_s, 0.01), self.started + WALL_FACTOR * self.limit_s)
        return None

    def starved(self, cost_s: float) -> str:
        """What is told of a call that ended as QUEUE_TIMEOUT by `verdict`."""
        return f"the machine is too busy: it gave this call {self.cpu_s:.1f} s of CPU in {cost_s:.0f} s\n"
