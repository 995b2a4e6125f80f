"""Closed-loop benchmark of the Code Judge: `python -m benchmarks.judge`.

Starts the service and drives it with 1, 32, 256 and 2,000 clients; one JSON line for each case. CPU is that of
the service's whole process tree, the clients' own left out. `--against URL` drives another server the same
way (its CPU is not seen). `--soak-s 600` runs 32 clients with a fault every 30 s instead and counts what is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import psutil

from rstar2_megatron.judge.client import JudgeClient, JudgeUnavailable
from rstar2_megatron.judge.service import JudgeService

PRINT = "print({i})"
NUMPY = "import numpy as np\na = np.arange(10000).reshape(100, 100) + {i}\nprint(int((a @ a.T).trace()))"
SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + {i}, x))"
LOOP = "while True: pass  # {i}"
CASES = ("print", "numpy", "sympy", "mix", "batch")
BATCH_SIZE = 64


def program(case: str, i: int) -> str:
    """The mix is 5% endless loops, the rest half print, half sympy."""
    if case in ("print", "batch"):
        return PRINT.format(i=i)
    if case == "mix":
        return (LOOP if i % 20 == 7 else PRINT if i % 2 else SYMPY).format(i=i)
    return {"numpy": NUMPY, "sympy": SYMPY}[case].format(i=i)


def _cpu_s(process: psutil.Process) -> float:
    """0 for a process that ended while it was looked at."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.Error:
        return 0.0


def _memory_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


class Tree:
    """CPU seconds and memory of a process with all its descendants, ended ones included."""

    def __init__(self, pid: int | None) -> None:
        self.root = psutil.Process(pid) if pid else None

    def _members(self) -> list[psutil.Process]:
        return [self.root, *self.root.children(recursive=True)] if self.root else []

    def cpu_s(self) -> float:
        return sum(map(_cpu_s, self._members()))

    def memory_mb(self) -> float:
        """Shared pages counted once (PSS)."""
        return sum(map(_memory_bytes, self._members())) / 1e6


def quantile(values: list[float], q: float) -> float | None:
    return round(1000 * sorted(values)[min(len(values) - 1, int(len(values) * q))], 1) if values else None


async def closed_loop(url: str, tree: Tree, case: str, clients: int, seconds: float) -> dict[str, Any]:
    """Each client sends its next call when the last one is answered, until `seconds` are over."""
    numbers = itertools.count(random.randrange(1 << 30) * 20)
    latencies: list[float] = []
    outcomes: Counter[str] = Counter()
    lost = 0
    async with JudgeClient(url, max_concurrency=clients, request_timeout_s=120, max_outage_s=60) as client:
        await client.run("1")
        cpu_before, started = tree.cpu_s(), time.monotonic()

        async def drive() -> None:
            nonlocal lost
            while time.monotonic() - started < seconds:
                sent = time.monotonic()
                try:
                    if case == "batch":
                        codes = [program(case, next(numbers)) for _ in range(BATCH_SIZE)]
                        results = await client.run_batch(codes)
                    else:
                        results = [await client.run(program(case, next(numbers)))]
                except JudgeUnavailable:
                    lost += 1
                    continue
                latencies.append(time.monotonic() - sent)
                outcomes.update(str(r.outcome) for r in results)

        await asyncio.gather(*(drive() for _ in range(clients)))
        elapsed = time.monotonic() - started
        calls = sum(outcomes.values())
        cpu = tree.cpu_s() - cpu_before
        retries = client.counters["retries"]
    return {
        "case": case,
        "clients": clients,
        "calls": calls,
        "calls_per_s": round(calls / elapsed, 1),
        "p50_ms": quantile(latencies, 0.5),
        "p95_ms": quantile(latencies, 0.95),
        "p99_ms": quantile(latencies, 0.99),
        "cpu_ms_per_call": round(1000 * cpu / calls, 2) if tree.root and calls else None,
        "lost": lost,
        "retries": retries,
        "outcomes": dict(outcomes),
        "memory_mb": round(tree.memory_mb()) if tree.root else None,
        "load_1min": round(os.getloadavg()[0], 1),
    }


async def soak(service: JudgeService, seconds: float, fault_every_s: float) -> dict[str, Any]:
    """32 clients; every `fault_every_s` the worker, a slot or Redis is killed. Nothing may be lost."""
    assert service.process is not None
    tree, root = Tree(service.process.pid), psutil.Process(service.process.pid)
    started, wrong, calls = time.monotonic(), 0, 0
    memory: list[int] = []
    faults_done: Counter[str] = Counter()

    def victim(kind: str) -> psutil.Process:
        for process in root.children(recursive=True):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            line = process.cmdline()
            generation = len(process.parents()) - len(root.parents())
            found = {
                "redis": process.name() == "redis-server",
                "worker": "worker" in line,
                "slot": generation == 4,  # worker > launcher > zygote > slot
            }
            if found[kind]:
                return process
        raise psutil.NoSuchProcess(0, kind)

    async def fault() -> None:
        for kind in itertools.cycle(["worker", "redis", "slot"]):
            await asyncio.sleep(fault_every_s)
            try:
                memory.append(round(tree.memory_mb()))
                target = victim(kind)
                target.send_signal(signal.SIGKILL)
                faults_done[kind] += 1
            except psutil.Error as error:
                print(f"no {kind} to kill: {error}", file=sys.stderr)

    async with JudgeClient(service.url, max_concurrency=32) as client:
        faults = asyncio.create_task(fault())

        async def drive(number: int) -> None:
            nonlocal wrong, calls
            while time.monotonic() - started < seconds:
                number += 32
                result = await client.run(f"import time; time.sleep(0.05); print({number})")
                calls += 1
                wrong += result.stdout != f"{number}\n"

        await asyncio.gather(*(drive(n) for n in range(32)))
        faults.cancel()
        counters = client.counters
    return {
        "case": "soak",
        "seconds": seconds,
        "faults": dict(faults_done),
        "calls": calls,
        "wrong": wrong,
        "memory_mb": memory,
        **counters,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge", description=__doc__)
    parser.add_argument("--against", metavar="URL", help="drive this server and start none")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 256, 2000])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--workers", type=int, default=8 * (os.cpu_count() or 1), help="slots")
    parser.add_argument("--time-limit-s", type=float, default=4.0)
    parser.add_argument("--soak-s", type=float, default=0.0)
    parser.add_argument("--fault-every-s", type=float, default=30.0)
    arguments = parser.parse_args()

    async def drive_all(url: str, tree: Tree) -> None:
        for case, clients in itertools.product(arguments.cases, arguments.clients):
            if case == "batch" and clients > 32:
                continue  # 64-batches: 32 clients have 2,048 calls in flight
            print(json.dumps(await closed_loop(url, tree, case, clients, arguments.seconds)), flush=True)

    if arguments.against:
        asyncio.run(drive_all(arguments.against, Tree(None)))
        return 0
    with JudgeService(workers=arguments.workers, time_limit_s=arguments.time_limit_s) as service:
        assert service.process is not None
        if arguments.soak_s:
            result = asyncio.run(soak(service, arguments.soak_s, arguments.fault_every_s))
            print(json.dumps(result), flush=True)
            return int(result["wrong"] > 0)
        asyncio.run(drive_all(service.url, Tree(service.process.pid)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
