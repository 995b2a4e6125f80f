"""The time limit counts what the program uses, not what it waits for a core; neighbours cannot take a call's share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.sandbox.cgroup import CpuShare, SlotGroup
from rstar2_megatron.judge.sandbox.process_tree import NICENESS, SLICE_S, Supervision, Usage, usage_of
from tests.judge.calls import MARK, marked, processes, until_marked
from tests.judge.waiting import until

BURN = "import time\nwhile time.process_time() < {seconds}: pass\nprint('done')"
KERNEL = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
FORKS = f"{MARK}import os\nfor _ in range(8):\n    if os.fork() == 0: break\nwhile True: pass"


async def burn(judge: JudgeService, calls: int, seconds: float, limit_s: float) -> list[Outcome]:
    """The outcomes of calls that use so many seconds of CPU."""
    async with JudgeClient(judge.url, time_limit_s=limit_s) as client:
        results = await asyncio.gather(*(client.run(BURN.format(seconds=seconds)) for _ in range(calls)))
    return [result.outcome for result in results]


async def test_calls_that_share_the_cores_are_no_timeouts(crowded: JudgeService) -> None:
    """More than there are slots, each with half its limit in CPU, so that one takes longer than the limit."""
    assert await burn(crowded, 18, 0.4, limit_s=0.8) == [Outcome.OK] * 18


@pytest.mark.ci
async def test_hostile_neighbours_leave_a_call_its_share(crowded: JudgeService) -> None:
    async with JudgeClient(crowded.url, time_limit_s=1.0) as client:

        async def attack() -> None:
            while True:
                assert (await client.run(FORKS)).outcome is not Outcome.OK

        hostile = [asyncio.create_task(attack()) for _ in range(12)]
        await until(lambda: len(marked(crowded)) >= 12, "they attack")
        assert await burn(crowded, 3, 0.2, limit_s=2.0) == [Outcome.OK] * 3
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)
        await until_marked(crowded, 0)


async def test_stopped_sessions_cannot_wake_each_other(crowded: JudgeService) -> None:
    wake = """
import os, signal, threading
def wake(pids):
    while True:
        for pid in pids: os.kill(pid, signal.SIGCONT)
first = os.getpid()
others = []
for _ in range(4):
    pid = os.fork()
    if pid == 0: wake([first, *others])
    others.append(pid)
threading.Thread(target=wake, args=(others,), daemon=True).start()
print(os.getuid())
"""

    def used_ns() -> dict[int, int]:
        """CPU time of the sessions' processes, which have uids of their own."""
        found = {}
        for process in processes(crowded):
            with contextlib.suppress(psutil.Error, OSError):
                if process.uids().real in uids:
                    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
                    found[process.pid] = sum(int(task.read_text().split()[0]) for task in tasks)
        return found

    async with JudgeClient(crowded.url) as client:
        status = await asyncio.to_thread(httpx.get, f"{crowded.url}/status", trust_env=False)
        (worker,) = status.json()["workers"].values()
        names = [uuid.uuid4().hex for _ in range(2)]
        told = [await client.run(wake, session=name) for name in names]
        uids = {int(result.stdout) for result in told}
        earlier: dict[int, int] = {}
        before = used_ns()
        async with asyncio.timeout(60.0):  # a busy machine takes a moment to stop the processes
            while before != earlier:
                await asyncio.sleep(0.2)
                earlier, before = before, used_ns()
        assert len(before) >= 10
        await asyncio.sleep(0.5)
        used = sum(used_ns().values()) - sum(before.values())
        assert used == 0 if "freezer" in worker["isolation"]["active"] else used < 0.1e9
        for name in names:
            assert (await client.run("print(len(others))", session=name)).stdout == "4\n"
            await client.close_session(name)


def slice_ms(scheduled: str) -> float:
    """The time slice that /proc/PID/sched tells."""
    (line,) = [line for line in scheduled.splitlines() if line.startswith("se.slice")]
    return int(line.split()[-1]) / 1e6


async def test_the_service_goes_before_the_calls_it_runs(crowded: JudgeService) -> None:
    assert crowded.process is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    service = os.getpriority(os.PRIO_PROCESS, crowded.process.pid)
    assert service == (-10 if own == 0 and os.geteuid() == 0 else own)
    async with JudgeClient(crowded.url) as client:
        for session in (None, uuid.uuid4().hex):
            told = await client.run("import os; print(os.getpriority(os.PRIO_PROCESS, 0))", session=session)
            assert int(told.stdout) == max(0, own)
            look = "print(*(line for line in open('/proc/self/sched') if 'slice' in line))"
            scheduled = await client.run(look, session=session)
            if "se.slice" in scheduled.stdout and KERNEL >= (6, 12):
                of_service = Path(f"/proc/{crowded.process.pid}/sched").read_text()
                assert slice_ms(of_service) == 0.1 < slice_ms(scheduled.stdout)
            if session:
                await client.close_session(session)


@contextlib.contextmanager
def busy(core: int = min(os.sched_getaffinity(0))) -> Iterator[int]:
    """A process on one core that computes for ever."""
    pid = os.fork()
    if pid == 0:
        os.sched_setaffinity(0, {core})
        while True:
            pass
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def test_a_cell_at_its_limit_has_its_share_again(crowded: JudgeService) -> None:
    """With what others leave, which it had before, it would not come back in time, and its names would be lost."""
    program = """
try:
    for _ in iter(int, 1): pass
except KeyboardInterrupt:
    end = time.process_time() + 0.05
    while time.process_time() < end: pass
    print('done')
"""
    async with JudgeClient(crowded.url, time_limit_s=1.5) as client:
        session = uuid.uuid4().hex
        await client.run("import time", session=session)
        call = asyncio.create_task(client.run(program, session=session))
        await asyncio.sleep(1.2)
        with contextlib.ExitStack() as neighbours:
            for core in 3 * sorted(os.sched_getaffinity(0)):
                neighbours.enter_context(busy(core))
            result = await call
        assert result.outcome in (Outcome.TIMEOUT, Outcome.INTERNAL_ERROR)  # the latter: the machine left it too little CPU
        assert (result.session, result.stdout) == ("kept", "done\n")
        await client.close_session(session)


class Scripted:
    """A call whose processes look as `at(seconds since its start)` tells: CPU time and whether one runs."""

    def __init__(self, at: Callable[[float], tuple[float, bool]]) -> None:
        self.now = 0.0
        self.demoted: list[bool] = []  # at each look: whether it uses only what new calls leave
        self.permit_returned_at: list[float] = []
        self.supervision = Supervision(
            lambda: 1,
            0.0,
            4.0,
            cast(SlotGroup, self),
            lambda: self.permit_returned_at.append(self.now),
            usage=lambda _: Usage([], *at(self.now)),
        )

    def set_share(self, share: CpuShare) -> bool:
        """In place of the slot's control group."""
        self.demoted.append(share is CpuShare.IDLE)
        return True

    def end(self) -> tuple[Outcome, float]:
        """How its slot ends it, and when."""
        call, verdict = self.supervision, None
        while verdict is None:
            self.now = min(call.deadline, call.next_look)
            if self.now == call.deadline:
                verdict = call.verdict(self.now)
            else:
                call.look(self.now)
        return verdict, self.now


@pytest.mark.parametrize("core", [1 / 8, 1 / 5, 1 / 2])
def test_half_the_limit_leaves_time_to_end(core: float) -> None:
    """A call may compute for half the limit, and has 0.3 s of CPU more for its start and end."""
    _, ended = Scripted(lambda now: (core * now, True)).end()
    assert core * ended >= 2.0 + 0.3


def test_waits_that_no_thread_accounts_for_are_not_the_calls() -> None:
    """Of children that end between two looks, and of a core that the machine's host took away."""
    call = Scripted(lambda now: (now / 40, True))
    assert call.end() == (Outcome.QUEUE_TIMEOUT, 32.0)
    assert "0.8 s of CPU in 32 s" in call.supervision.starved(32.0)


def test_a_call_gives_way_only_while_it_has_its_share() -> None:
    """Else a stream of new calls could keep it from the cores until its wall limit."""
    quick = Scripted(lambda now: (now / 4, True))
    quick.end()
    assert quick.demoted and all(quick.demoted)
    starved = Scripted(lambda now: (min(now, 0.1) + max(0.0, now - 0.1) / 20, True))
    assert starved.end()[0] is Outcome.QUEUE_TIMEOUT
    early, late = starved.demoted[:2], starved.demoted[-20:]
    assert all(early) and not any(late)


def test_sleep_is_the_calls_own_time() -> None:
    assert Scripted(lambda _: (0.0, False)).end() == (Outcome.TIMEOUT, 4.0)
    verdict, ended = Scripted(lambda now: (now / 4, now % 0.2 < 0.05)).end()
    assert verdict is Outcome.TIMEOUT and ended < 6.0


def test_a_call_keeps_no_other_from_beginning_for_long() -> None:
    """Its permit goes back when it sleeps, has used its slice of CPU, or has run for a tenth of a second."""
    for at, longest_s in ((lambda _: (0.0, False), 0.05), (lambda now: (now, True), 0.1), (lambda _: (0.0, True), 0.2)):
        call = Scripted(at)
        call.end()
        (returned_at,) = call.permit_returned_at
        assert returned_at < longest_s


def test_a_wait_for_a_core_is_no_sleep() -> None:
    with busy() as greedy, busy() as starved:
        os.sched_setscheduler(starved, os.SCHED_IDLE, os.sched_param(0))
        before = usage_of(greedy).cpu_s
        while usage_of(greedy).cpu_s < before + 0.1:
            assert usage_of(starved).is_running
    sleeps = subprocess.Popen(["sleep", "60"])
    try:
        while usage_of(sleeps.pid).is_running:  # it starts
            time.sleep(0.01)
    finally:
        sleeps.kill()
        os.waitid(os.P_PID, sleeps.pid, os.WEXITED | os.WNOWAIT)
        assert usage_of(sleeps.pid).is_running, "it has ended, and nobody has been told"
        sleeps.wait()
        assert usage_of(sleeps.pid).is_running


def test_where_there_are_no_cpu_groups_a_long_calls_processes_are_nicer() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with busy() as pid:
        call = Supervision(lambda: pid, time.monotonic(), 60.0, None, lambda: None)
        while call.cpu_s < SLICE_S:
            assert os.getpriority(os.PRIO_PROCESS, pid) == own
            call.look(time.monotonic())
        assert os.getpriority(os.PRIO_PROCESS, pid) == (NICENESS if os.geteuid() == 0 else max(own, NICENESS))
