"""A burst of calls at once over several worker nodes: `python -m benchmarks.judge.burst` (as root).

Each worker runs in a network namespace of its own, connected to Redis by a bridge. A third of the calls goes by `/run/batch`, a
third by `/run/long-batch` (both as the public clients send them: in their template, 32 a request, only queue_timeout is sent
again), a third by JudgeClient at its defaults (128 in flight). Half of them print, half use sympy, each its own numbers. Exit
code 1 when an answer is wrong or missing, or when the workers have run another number of calls than was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.judge.calls import Tree, alive_workers, quantile, serving
from benchmarks.judge.programs import in_public_template, program
from benchmarks.records import write_result
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.commands import go_before_calls
from rstar2_megatron.judge.sandbox.linux import raise_open_files
from rstar2_megatron.services.process import free_port
from rstar2_megatron.services.redis_server import RedisServer

BRIDGE, NETWORK = "judge-burst", "10.213.7"
SUBMISSIONS = 32  # a request
_JSON = {"Content-Type": "application/json"}
JUDGE = "rstar2_megatron.judge"


class OpenRedis(RedisServer):
    """Listens on the bridge too."""

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()
        self.options = ("--port", str(self.port), "--bind", f"{NETWORK}.1", "--protected-mode", "no")

    @property
    def uri(self) -> str:
        return f"redis://{NETWORK}.1:{self.port}/0"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Names of new network namespaces that reach this one at NETWORK.1, and each other."""
    names = [f"{BRIDGE}-{n}" for n in range(count)]
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(names):
            inside = ("netns", "exec", name, "ip")
            _ip("netns", "add", name)
            _ip("link", "add", f"jb{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"jb{number}", "master", BRIDGE, "up")
            _ip(*inside, "addr", "add", f"{NETWORK}.{number + 2}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def service(workers: int) -> Iterator[tuple[str, Tree]]:
    """HTTP server, Redis and workers at default settings: URL and processes."""
    go_before_calls()  # Redis too: all "nodes" share this machine
    with namespaces(workers) as names, OpenRedis() as redis, tempfile.TemporaryDirectory() as directory:
        port_file = Path(directory) / "port.json"
        serve = ["serve", "--redis-uri", redis.uri, "--port-file", str(port_file)]
        work = ["worker", "--redis-uri", redis.uri]
        commands = [[sys.executable, "-m", JUDGE, *serve]]
        # ip-netns-exec would hide the control groups.
        commands += [["nsenter", f"--net=/run/netns/{n}", sys.executable, "-m", JUDGE, *work] for n in names]
        with serving(redis, port_file, commands, lambda: len(alive_workers(redis)) >= workers) as served:
            yield served


def expected(number: int) -> str:
    """What `program` prints for it."""
    code = program("print" if number % 2 else "sympy", number)
    if number % 2:
        return f"{number}\n"
    total, product = map(int, re.findall(r"- (\d+)\*x \+ (\d+)", code)[0])
    root = round((total * total - 4 * product) ** 0.5)
    roots = {(total - root) // 2, (total + root) // 2}
    return f"{sorted(roots)}\n"


def request_body(numbers: list[int]) -> bytes:
    """The JSON that the public clients send for these calls."""
    codes = [program("print" if n % 2 else "sympy", n) for n in numbers]
    items = [{"type": "python", "solution": in_public_template(code)} for code in codes]
    return json.dumps({"submissions": items}).encode()


class Burst:
    """Sends calls and checks their answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.latencies: list[float] = []
        self.wrong: Counter[str] = Counter()
        self.again = 0
        self.started = time.monotonic()

    def check(self, number: int, outcome: str, stdout: str) -> None:
        self.latencies.append(time.monotonic() - self.started)
        if outcome != "ok" or stdout != expected(number):
            self.wrong[outcome if outcome != "ok" else f"{number}: {stdout!r}"] += 1

    async def by_route(self, http: aiohttp.ClientSession, route: str, numbers: list[int], body: bytes) -> None:
        """`body` is `request_body(numbers)`."""
        while numbers:
            async with http.post(f"{self.url}{route}", data=body, headers=_JSON) as response:
                if response.status == 429:
                    await asyncio.sleep(1.0)
                    continue
                results = (await response.json())["results"]
            late = []
            for number, result in zip(numbers, results, strict=True):
                if result["reason"] == "queue_timeout":
                    late.append(number)
                else:
                    self.check(number, result["outcome"], result["stdout"])
            self.again += len(late)
            numbers, body = late, request_body(late)

    async def by_client(self, client: JudgeClient, number: int) -> None:
        result = await client.run(program("print" if number % 2 else "sympy", number))
        self.check(number, str(result.outcome), result.stdout)

    async def send(self, calls: int) -> dict[str, Any]:
        first = random.randrange(1 << 20) * 2
        numbers = list(range(first, first + calls))
        random.shuffle(numbers)
        third = calls // 3
        unlimited = aiohttp.ClientTimeout(total=3600)
        async with (
            aiohttp.ClientSession(timeout=unlimited, connector=aiohttp.TCPConnector(limit=0)) as http,
            JudgeClient(self.url) as client,
        ):
            await client.run("1")
            parts = {"/run/batch": numbers[:third], "/run/long-batch": numbers[third : 2 * third]}
            requests = [
                (route, group, request_body(group))  # made before the first is sent: this process has one thread
                for route, part in parts.items()
                for group in (part[i : i + SUBMISSIONS] for i in range(0, third, SUBMISSIONS))
            ]
            self.started = time.monotonic()
            tasks = [self.by_route(http, *request) for request in requests]
            await asyncio.gather(*tasks, *(self.by_client(client, n) for n in numbers[2 * third :]))
            seconds = time.monotonic() - self.started
            await asyncio.sleep(2.0)  # the next heartbeats tell the workers' counts
            async with http.get(f"{self.url}/status") as response:
                workers = (await response.json())["workers"].values()
            retries = client.counters["retries"]
        return {
            "calls": calls,
            "answered": len(self.latencies),
            "wrong": dict(self.wrong),
            "run_by_workers": [worker["calls"] for worker in workers],
            "queue_timeouts_sent_again": self.again,
            "client_retries": retries,
            "seconds": round(seconds, 1),
            "p50_ms": quantile(self.latencies, 0.5),
            "p99_ms": quantile(self.latencies, 0.99),
            "isolation": [worker["isolation"]["level"] for worker in workers],
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge.burst", description=__doc__)
    parser.add_argument("--calls", type=int, default=45_000)
    parser.add_argument("--workers", type=int, default=4, help="worker processes, each in its network namespace")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON: command, machine, result")
    arguments = parser.parse_args()
    raise_open_files()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and processes end too
    with service(arguments.workers) as (url, tree):
        before = tree.cpu_s()
        line = asyncio.run(Burst(url).send(arguments.calls))
        cpu = tree.cpu_s()
        cpu.subtract(before)
        line["cpu_ms_by_part"] = {part: round(1000 * cpu[part] / arguments.calls, 2) for part in sorted(cpu)}
        line["load_1min"] = round(os.getloadavg()[0], 1)
    print(json.dumps(line), flush=True)
    write_result(arguments.out, line)
    right = not line["wrong"] and line["answered"] == line["calls"]
    return 0 if right and sum(line["run_by_workers"]) == line["calls"] + 1 else 1


if __name__ == "__main__":
    sys.exit(main())
