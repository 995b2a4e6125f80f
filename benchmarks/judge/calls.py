"""Closed-loop benchmark of the Code Judge: `python -m benchmarks.judge.calls`.

Starts the service and drives it with 1, 32, 256 and 2,000 clients; one JSON line for each case. CPU is that of
the service's whole process tree, without the clients'. The case `overhead` has no sandbox: its worker answers at once, which
leaves HTTP and Redis. `--against URL` then drives another server with the same cases, as far as it supports them; its CPU is
not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from redis import Redis

from benchmarks.judge.bare import bare_fork_cpu_ms
from benchmarks.judge.programs import BARE_CASES, program
from benchmarks.judge.running import running_judge
from benchmarks.records import write_result
from rstar2_megatron.judge.client.client import JudgeClient, JudgeUnavailable
from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.judge.sandbox.linux import raise_open_files
from rstar2_megatron.services.process import terminate_tree
from rstar2_megatron.services.redis_server import RedisServer

CASES = (
    "print", "template", "numpy", "sympy", "template_sympy", "surds", "mix", "batch", "session", "burn", "hostile",
    "busy", "run_code", "overhead",
)  # fmt: skip
# What other clients do meanwhile, and how many: "hostile" is calls beside endless ones with nine processes each, "busy" one
# client's short calls beside calls of 0.6 s of CPU.
BACKGROUND = {"hostile": ("attack", 12), "busy": ("burn", 4)}
OURS_ONLY = ("session", "overhead")
BATCH_SIZE = 64
# 32 clients with 64-batches have 2,048 calls in flight; more may be asked for, and wait accordingly
CLIENTS: dict[str, tuple[int, ...]] = {case: (1, 32) if case in ("surds", "batch") else (1, 32, 256, 2000) for case in CASES}
CLIENTS |= {"burn": (32,), "hostile": (4,), "busy": (1,)}
CALLS_A_SESSION = 8


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process; 0 when it has just ended."""
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
    """CPU seconds and memory of processes with all their descendants, ended ones included."""

    def __init__(self, *pids: int) -> None:
        self.roots = [psutil.Process(pid) for pid in pids]

    def _members(self) -> list[psutil.Process]:
        return [p for root in self.roots for p in (root, *root.children(recursive=True))]

    def cpu_s(self) -> Counter[str]:
        """By part of the service."""
        parts: Counter[str] = Counter()
        for process in self._members():
            parts[_part(process)] += _cpu_s(process)  # type: ignore[assignment]
        return parts

    def memory_mb(self) -> float:
        """Shared pages counted once (PSS)."""
        return sum(map(_memory_bytes, self._members())) / 1e6


def _part(process: psutil.Process) -> str:
    try:
        words = {process.name(), *process.cmdline()}
    except psutil.Error:
        return "sandbox"
    if "redis-server" in words:
        return "redis"
    if "rstar2_megatron.judge" in words:
        return "worker" if "worker" in words else "server"
    return "worker" if "benchmarks.judge.echo_worker" in words else "sandbox"


def quantile(values: list[float], q: float) -> float | None:
    return round(1000 * sorted(values)[min(len(values) - 1, int(len(values) * q))], 1) if values else None


async def one_turn(
    client: JudgeClient, http: aiohttp.ClientSession, case: str, numbers: Iterator[int]
) -> list[tuple[JudgeResult, float]]:
    """One round of a client: its results, each with the latency in seconds."""
    if case == "batch":
        codes = [program(case, next(numbers)) for _ in range(BATCH_SIZE)]
        submissions = [{"type": "python", "solution": code} for code in codes]
        sent = time.monotonic()
        async with http.post("/run/long-batch", json={"type": "batch", "submissions": submissions}) as reply:
            reply.raise_for_status()
            results = map(JudgeResult.from_wire, (await reply.json())["results"])
        return [(result, time.monotonic() - sent) for result in results]
    if case == "run_code":  # SandboxFusion's route, as verl's client asks for a call
        sent = time.monotonic()
        body: dict[str, Any] = {
            "code": program(case, next(numbers)),
            "stdin": None,
            "language": "python",
            "files": {},
            "run_timeout": 4,
        }
        async with http.post("/run_code", json=body) as reply:
            reply.raise_for_status()
            success = (await reply.json())["status"] == "Success"
        return [(JudgeResult(Outcome.OK if success else Outcome.ERROR, "", "", success=success), time.monotonic() - sent)]
    session = uuid.uuid4().hex if case == "session" else None
    timed = []
    for _ in range(CALLS_A_SESSION if session else 1):
        sent = time.monotonic()
        result = await client.run(program(case, next(numbers)), session=session)
        timed.append((result, time.monotonic() - sent))
    if session:
        await client.close_session(session)
    return timed


async def _disturb(url: str, case: str, numbers: Iterator[int]) -> None:
    """Drive the case's background until cancelled."""
    background, clients = BACKGROUND[case]
    async with JudgeClient(url, client_id="others", max_concurrency=clients) as client:

        async def drive() -> None:
            while True:
                await client.run(program(background, next(numbers)))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(drive())


async def closed_loop(url: str, tree: Tree, case: str, clients: int, seconds: float) -> dict[str, Any]:
    """Each client sends its next call when the last one is answered, until `seconds` are over."""
    numbers = itertools.count(random.randrange(1 << 30) * 20)
    latencies: list[float] = []
    outcomes: Counter[str] = Counter()
    lost = 0
    async with (
        JudgeClient(url, max_concurrency=clients, request_timeout_s=120, max_outage_s=60) as client,
        aiohttp.ClientSession(
            url, connector=aiohttp.TCPConnector(limit=clients), timeout=aiohttp.ClientTimeout(total=3600)
        ) as http,
    ):
        await client.run("1")
        others = [asyncio.create_task(_disturb(url, case, numbers)) for _ in range(case in BACKGROUND)]
        cpu_before, started = tree.cpu_s(), time.monotonic()

        async def drive() -> None:
            nonlocal lost
            while time.monotonic() - started < seconds:
                try:
                    timed = await one_turn(client, http, case, numbers)
                except (JudgeUnavailable, aiohttp.ClientError):
                    lost += BATCH_SIZE if case == "batch" else 1
                    continue
                latencies.extend(latency for _, latency in timed)
                outcomes.update(str(result.outcome) for result, _ in timed)
                lost += sum(result.is_infrastructure for result, _ in timed)

        await asyncio.gather(*(drive() for _ in range(clients)))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        elapsed = time.monotonic() - started
        calls = sum(outcomes.values())
        cpu = tree.cpu_s()
        cpu.subtract(cpu_before)
        retries = client.counters["retries"]
    seen = bool(tree.roots and calls)
    return {
        "case": case,
        "clients": clients,
        "calls": calls,
        "calls_per_s": round(calls / elapsed, 1),
        "p50_ms": quantile(latencies, 0.5),
        "p95_ms": quantile(latencies, 0.95),
        "p99_ms": quantile(latencies, 0.99),
        "max_ms": quantile(latencies, 1.0),
        "cpu_ms_per_call": round(1000 * sum(cpu.values()) / calls, 2) if seen else None,
        "cpu_ms_by_part": {part: round(1000 * cpu[part] / calls, 2) for part in sorted(cpu)} if seen else None,
        "lost": lost,
        "retries": retries,
        "outcomes": dict(outcomes),
        "memory_mb": round(tree.memory_mb()) if seen else None,
        "load_1min": round(os.getloadavg()[0], 1),
    }


def alive_workers(redis: RedisServer) -> list[Any]:
    """The heartbeats of the workers that use this Redis."""
    with Redis.from_url(redis.uri) as client:
        return list(client.scan_iter("*alive:*"))


@contextlib.contextmanager
def serving(
    redis: RedisServer, port_file: Path, commands: list[list[str]], ready: Callable[[], bool]
) -> Iterator[tuple[str, Tree]]:
    """A server, which writes `port_file`, and its workers, once they are `ready`: URL and processes, Redis included."""
    started = [subprocess.Popen(command) for command in commands]
    try:
        deadline = time.monotonic() + 60
        while not (port_file.exists() and ready()):
            if time.monotonic() > deadline or any(process.poll() is not None for process in started):
                raise RuntimeError(f"ended, or not ready after 60 s: {commands}")
            time.sleep(0.02)
        assert redis.process is not None
        pids = [process.pid for process in (*started, redis.process)]
        yield json.loads(port_file.read_text())["url"], Tree(*pids)
    finally:
        for process in started:
            terminate_tree(process.pid)
            process.wait()


@contextlib.contextmanager
def service_without_sandbox() -> Iterator[tuple[str, Tree]]:
    """HTTP server, Redis and a worker that answers at once: URL and processes."""
    with RedisServer() as redis, tempfile.TemporaryDirectory() as directory:
        port_file = Path(directory) / "port.json"
        serve = ["rstar2_megatron.judge", "serve", "--redis-uri", redis.uri, "--port-file", str(port_file)]
        echo = ["benchmarks.judge.echo_worker", redis.uri]
        commands = [[sys.executable, "-m", *words] for words in (serve, echo)]
        with serving(redis, port_file, commands, lambda: bool(alive_workers(redis))) as served:
            yield served


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge.calls", description=__doc__)
    parser.add_argument("--against", metavar="URL", help="then drive this server, with the same cases")
    parser.add_argument("--only-against", action="store_true", help="start none of ours")
    parser.add_argument("--clients", type=int, nargs="+", help="default: 1 32 256 2000; of 64-batches 1 32")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON: command, machine, the lines so far")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--workers", type=int, default=8 * (os.cpu_count() or 1), help="slots")
    parser.add_argument("--time-limit-s", type=float, default=4.0)
    parser.add_argument("--sessions", type=int, default=2000, help="live interpreters, most at a time")
    arguments = parser.parse_args()

    raise_open_files()
    lines: list[dict[str, Any]] = []
    machine = f"{platform.machine()} Linux {platform.release()}, Python {platform.python_version()}"

    def drive(url: str, tree: Tree, cases: list[str], **more: str | float) -> None:
        for case in cases:
            if tree.roots and case in BARE_CASES:
                more["bare_fork_cpu_ms"] = bare_fork_cpu_ms(case)
            else:
                more.pop("bare_fork_cpu_ms", None)
            for clients in arguments.clients or CLIENTS[case]:
                line = asyncio.run(closed_loop(url, tree, case, clients, arguments.seconds)) | more
                print(json.dumps(line), flush=True)
                lines.append(line)
                write_result(arguments.out, {"machine": machine, "lines": lines})

    settings = ("--sessions", str(arguments.sessions))
    cases = [case for case in arguments.cases if case != "overhead"]
    if cases and not arguments.only_against:
        limits = {"num_workers": arguments.workers, "time_limit_s": arguments.time_limit_s}
        with running_judge(extra_arguments=settings, **limits) as service:
            assert service.process is not None
            drive(service.url, Tree(service.process.pid), cases)
    if "overhead" in arguments.cases and not arguments.only_against:
        with service_without_sandbox() as (url, tree):
            drive(url, tree, ["overhead"])
    if arguments.against:
        drive(arguments.against, Tree(), [c for c in cases if c not in OURS_ONLY], server=arguments.against)
    return 0


if __name__ == "__main__":
    sys.exit(main())
