"""What happens when a part dies: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.services.process import free_port
from tests.judge.calls import HELD, find, gone, let_go, marked, processes, until_marked
from tests.judge.waiting import until

LIBRARIES = ["", "import numpy\n"]  # which of a slot's two call parents is used


@pytest.fixture(scope="module")
def service() -> Iterator[JudgeService]:
    with running_judge(num_workers=2, time_limit_s=60.0) as service:
        yield service


async def test_a_workers_death(service: JudgeService) -> None:
    """Its calls run again elsewhere, its sessions are lost, and nothing of its sandbox lives on."""
    session = uuid.uuid4().hex
    async with JudgeClient(service.url, time_limit_s=60.0) as client:
        await client.run("x = 1", session=session)
        calls = [asyncio.create_task(client.run(HELD)) for _ in range(3)]
        await until_marked(service, 2)
        worker = find(service, "worker")
        sandbox = worker.children(recursive=True)
        worker.send_signal(signal.SIGKILL)
        cells = [client.run("x", session=session), client.run("'fresh'", session=session + "b")]
        lost, fresh, *results = await let_go(service, *map(asyncio.ensure_future, cells), *calls)
        assert lost.outcome is Outcome.SESSION_LOST and fresh.stdout == "'fresh'\n"
        assert [result.stdout for result in results] == ["done\n"] * 3
        assert client.counters["retries"] == 0
        await client.close_session(session + "b")
    await until(lambda: all(map(gone, sandbox)), "the dead worker's sandbox has ended")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("part", ["slot", "call parent"])
async def test_a_part_of_the_sandbox_dies_in_mid_call(service: JudgeService, library: str, part: str) -> None:
    """The call ends with it, and is done again."""
    async with JudgeClient(service.url, time_limit_s=60.0) as client:
        call = asyncio.create_task(client.run(library + HELD))
        (process,) = await until_marked(service, 1)
        for dying in _slots(process) if part == "slot" else [_parent(process)]:
            dying.send_signal(signal.SIGKILL)
        await until(lambda: gone(process), "the call has ended")
        (result,) = await let_go(service, call)
        assert result.stdout == "done\n"
        assert (await client.run(library + "1 + 1")).stdout == "2\n"


def _parent(process: psutil.Process) -> psutil.Process:
    above = process.parent()
    assert above is not None
    return above


def _slots(call: psutil.Process) -> list[psutil.Process]:
    """Slot processes: zygote > slot > call parent > call, and zygote > library zygote > call parent > call."""
    beside = _parent(_parent(_parent(call))).children()
    return [p for p in beside if "numpy" not in Path(f"/proc/{p.pid}/maps").read_text()]


async def test_a_job_whose_slot_dies_twice_is_an_internal_error(service: JudgeService) -> None:
    async with JudgeClient(service.url, time_limit_s=60.0) as client:
        call = asyncio.create_task(client.run(HELD))
        for _ in range(4):  # the client tries it as another job once more
            (process,) = await until_marked(service, 1)
            _parent(process).send_signal(signal.SIGKILL)
            await until(lambda dead=process: gone(dead), "the call has ended")  # type: ignore[misc]
        result = await call
        assert result.outcome is Outcome.INTERNAL_ERROR and "died twice" in result.stderr


async def test_redis_dies(service: JudgeService) -> None:
    """It starts again on its append-only file: no job and no session is lost."""
    session = uuid.uuid4().hex
    async with JudgeClient(service.url, time_limit_s=60.0) as client:
        await client.run("x = 41", session=session)
        with Redis.from_url(service.redis_uri) as redis:

            def is_written() -> bool:
                told = redis.info("persistence")
                return told["aof_buffer_length"] == told["aof_pending_bio_fsync"] == 0

            await until(is_written, "the session is in the append-only file")
        calls = [asyncio.create_task(client.run(HELD)) for _ in range(6)]
        await until_marked(service, 2)
        (server,) = [process for process in processes(service) if process.name() == "redis-server"]
        server.send_signal(signal.SIGKILL)
        await until(lambda: gone(server), "Redis has ended")
        results = await let_go(service, *calls)
        assert [result.stdout for result in results] == ["done\n"] * 6
        kept = await client.run("x + 1", session=session)
        assert (kept.stdout, kept.session) == ("42\n", "kept")
        await client.close_session(session)


@contextlib.contextmanager
def http_server(service: JudgeService, port: int, port_file: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A second server for a service's Redis and workers."""
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "rstar2_megatron.judge", "serve", "--port", str(port), "--redis-uri", service.redis_uri]
    with subprocess.Popen([*command, "--port-file", str(port_file)]) as process:
        try:
            deadline = time.monotonic() + 120
            while not port_file.exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            yield json.loads(port_file.read_text())["url"], process
        finally:
            process.terminate()


@pytest.mark.ci
async def test_the_http_server_dies_while_clients_wait(service: JudgeService, tmp_path: Path) -> None:
    """They retry under the same ids, and the calls that go on meanwhile do not run twice."""
    port, port_file = free_port(), tmp_path / "port.json"
    with http_server(service, port, port_file) as (url, process):
        client = JudgeClient(url, time_limit_s=60.0, request_timeout_s=60.0)
        calls = [asyncio.create_task(client.run(HELD)) for _ in range(4)]
        before = await until_marked(service, 2)
        process.kill()
        process.wait()
        await until(lambda: client.counters.get("outages"), "the clients notice")
    with http_server(service, port, port_file):
        assert {p.pid for p in marked(service)} == {p.pid for p in before}
        results = await let_go(service, *calls)
        assert [result.stdout for result in results] == ["done\n"] * 4
        assert client.counters["outage_seconds"] > 0
        await client.close()
