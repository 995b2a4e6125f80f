"""Ten minutes of calls with a fault every 30 s: `python -m benchmarks.judge.soak`.

Kills the worker, Redis and a process of the sandbox in turn while 32 clients send calls, every 16th with 0.3 s of CPU, 4 use
sessions, and some run endless programs of nine processes. One JSON line; exit code 1 when a call was lost or wrong (a false
timeout is wrong), when memory was not flat, or when a process, mount, directory or control group is left at the end.

Memory is the service's without Redis, shared pages counted once, every few seconds: the median of the last quarter may
be at most 10% and 10 MB above that of the second quarter (the first is for the start). Redis is told apart: it keeps
every answer for 10 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.judge.calls import Tree
from benchmarks.judge.programs import ATTACK, BURN
from benchmarks.judge.running import running_judge
from benchmarks.records import write_result
from rstar2_megatron.judge.client.client import JudgeClient, JudgeUnavailable
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.services.owned_directory import sweep_stale_directories

_SAMPLE_S = 5.0
_MOST_EXAMPLES = 5
_GROWTH = 1.1
_GROWTH_MB = 10.0


def memory_is_flat(samples: list[float]) -> bool:
    """Whether memory, sampled in MB at even intervals, did not grow. False with too few samples."""
    quarter = len(samples) // 4
    if quarter < 2:
        return False
    before = statistics.median(samples[quarter : 2 * quarter])
    return statistics.median(samples[-quarter:]) <= _GROWTH * before + _GROWTH_MB


class Soak:
    """The clients, the faults, and the counts of both."""

    def __init__(self, service: JudgeService, seconds: float, fault_every_s: float, hostile: int) -> None:
        assert service.process is not None
        self.service = service
        self.seconds = seconds
        self.fault_every_s = fault_every_s
        self.hostile = hostile
        self.root = psutil.Process(service.process.pid)
        self.ends_at = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.memory_mb: list[float] = []
        self.redis_mb: list[float] = []  # grows until answers are old enough to be forgotten (10 minutes)
        self.wrong: list[dict[str, Any]] = []  # the first few
        self.family: dict[int, float] = {self.root.pid: self.root.create_time()}

    def remember_family(self) -> None:
        """Record all processes of the service with their start times: none of them may exist at the end."""
        for process in self.root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                self.family[process.pid] = process.create_time()

    def _is(self, process: psutil.Process, kind: str) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if kind == "redis":
                return process.name() == "redis-server"
            if kind == "worker":
                return "worker" in process.cmdline()
            # worker > launcher > zygote > slot > call parent, or library zygote > call parent; its call is done again. A call's
            # own process, with a PID namespace of its own, may have killed itself: "killed" is then the right answer.
            above = process.parents()
            is_call = _pid_namespace(process.pid) != _pid_namespace(above[0].pid)
            return len(above) - len(self.root.parents()) in (4, 5) and not is_call
        except (psutil.Error, OSError):  # calls end while they are looked at
            return False

    def _victim(self, kind: str) -> psutil.Process:
        family = self.root.children(recursive=True)
        random.shuffle(family)
        for process in family:
            if self._is(process, kind):
                return process
        raise psutil.NoSuchProcess(0, kind)

    async def _make_faults(self) -> None:
        for kind in itertools.cycle(["worker", "redis", "slot"]):
            await asyncio.sleep(self.fault_every_s)
            self.remember_family()
            try:
                self._victim(kind).send_signal(signal.SIGKILL)
                self.faults[kind] += 1
            except psutil.Error as error:
                print(f"no {kind} to kill: {error}", file=sys.stderr)

    async def _sample_memory(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            try:
                redis_mb = Tree(self._victim("redis").pid).memory_mb()
                self.memory_mb.append(round(Tree(self.root.pid).memory_mb() - redis_mb, 1))
                self.redis_mb.append(round(redis_mb, 1))
            except psutil.Error:  # Redis is being replaced
                continue

    def _check(self, result: JudgeResult, expected: int) -> None:
        if result.stdout != f"{expected}\n":
            self.counts["wrong"] += 1
            if len(self.wrong) < _MOST_EXAMPLES:
                self.wrong.append({"expected": expected, **result._asdict()})

    async def _call(self, client: JudgeClient, number: int) -> None:
        while time.monotonic() < self.ends_at:
            number += 32
            sleep = f"import time; time.sleep(0.05); print({number})"
            code = BURN.format(seconds=0.3, i=number) if number // 32 % 16 == 0 else sleep
            try:
                result = await client.run(code)
            except JudgeUnavailable:
                self.counts["lost"] += 1
                continue
            self.counts["calls"] += 1
            self._check(result, number)

    async def _attack(self, client: JudgeClient) -> None:
        while time.monotonic() < self.ends_at:
            with contextlib.suppress(JudgeUnavailable):
                result = await client.run(ATTACK.format(i=0))
                self.counts[f"hostile_{result.outcome}"] += 1

    async def _count_up(self, client: JudgeClient, number: int) -> None:
        """A session that counts its calls; when the judge says that it is lost, another begins."""
        name, count = "", 0
        while time.monotonic() < self.ends_at:
            if not count:
                name = f"soak-{number}-{time.monotonic_ns()}"
            result = await client.run("n = globals().get('n', 0) + 1; print(n)", session=name)
            count += 1
            self.counts["session_calls"] += 1
            if result.outcome is Outcome.SESSION_LOST:
                self.counts["sessions_lost"] += 1
                count = 0
            else:
                self._check(result, count)
            if count == 20:
                await client.close_session(name)
                count = 0
            await asyncio.sleep(0.2)

    async def run(self) -> dict[str, Any]:
        async with JudgeClient(self.service.url, max_concurrency=64) as client:
            others = [asyncio.create_task(task()) for task in (self._make_faults, self._sample_memory)]
            await asyncio.gather(
                *(self._call(client, n) for n in range(32)),
                *(self._count_up(client, n) for n in range(4)),
                *(self._attack(client) for _ in range(self.hostile)),
            )
            for task in others:
                task.cancel()
            counters = client.counters
        counts = {name: self.counts[name] for name in ("calls", "lost", "wrong", "session_calls", "sessions_lost")}
        return {
            "case": "soak",
            "seconds": self.seconds,
            "faults": dict(self.faults),
            **counts,
            "hostile": {name: count for name, count in self.counts.items() if name.startswith("hostile_")},
            "wrong_results": self.wrong,
            "retries": counters["retries"],
            "memory_is_flat": memory_is_flat(self.memory_mb),
            "memory_mb": self.memory_mb,
            "redis_mb": self.redis_mb,
            "load_1min": round(os.getloadavg()[0], 1),
        }


def _pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def left_behind(family: dict[int, float], mounts_before: set[str]) -> dict[str, list[str]]:
    """Remains of the service's processes (id -> start time) on this machine, on which other services may run."""
    owners = {str(pid) for pid in family}
    prefixes = ("rstar2-judge-", "rstar2-redis-")
    groups = list(Path("/sys/fs/cgroup").glob("**/rstar2-judge-*"))
    mounts = set(_mounts()) - mounts_before
    return {
        "processes": [str(p) for p in psutil.process_iter() if family.get(p.pid) == p.create_time()],
        "mounts": sorted(line for line in mounts if "rstar2" in line or line.split()[1] == "/tmp"),
        "directories": sorted(str(path) for prefix in prefixes for path in sweep_stale_directories(prefix)),
        "control_groups": sorted(str(p) for p in groups if owners & set(p.name.split("-"))),
    }


def _mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--fault-every-s", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=8 * (os.cpu_count() or 1), help="slots")
    parser.add_argument("--hostile", type=int, default=6, help="clients that run endless programs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON: command, machine, the line")
    arguments = parser.parse_args()
    mounts = set(_mounts())
    with running_judge(num_workers=arguments.workers) as service:
        soak = Soak(service, arguments.seconds, arguments.fault_every_s, arguments.hostile)
        result = asyncio.run(soak.run())
        soak.remember_family()
    time.sleep(1.0)  # for the kernel to reap what was ended
    left = left_behind(soak.family, mounts)
    report = {**result, "processes_seen": len(soak.family), "left": left}
    print(json.dumps(report), flush=True)
    write_result(arguments.out, report)
    return int(bool(result["lost"] or result["wrong"] or any(left.values())) or not result["memory_is_flat"])


if __name__ == "__main__":
    sys.exit(main())
