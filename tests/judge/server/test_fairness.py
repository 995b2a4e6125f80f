"""Nobody starves: clients take turns, and a call that uses much CPU is demoted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.queue import JobQueue
from rstar2_megatron.judge.scheduling import FreeList, Permit
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.waiting import until


async def test_a_client_with_one_call_does_not_wait_for_one_with_many(judge: JudgeService) -> None:
    async with JudgeClient(judge.url, client_id="many") as many, JudgeClient(judge.url, client_id="one") as one:
        crowd = [asyncio.create_task(many.run("import time; time.sleep(0.1)")) for _ in range(60)]
        while many.counters["calls"] < 60:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # all of them are queued or run
        assert (await one.run("print('in turn')")).ok
        assert sum(task.done() for task in crowd) < 30
        assert all(result.ok for result in await asyncio.gather(*crowd))


@pytest.mark.parametrize("at_once", [1, 5, 32])
async def test_calls_that_open_sessions_come_last_but_come(at_once: int) -> None:
    """Whose turn it is does not depend on how many jobs a worker takes at once."""
    with RedisServer() as redis:
        queue = JobQueue(redis.uri)
        await queue.heartbeat("worker", {}, [])
        await queue.enqueue("replies", [("client/u0@open", b"{}")])
        (first,) = await queue.exchange("worker", [], 1, 100)
        await queue.exchange("worker", [(first.key, b"{}")], 0)
        kinds = {"open": "client/u{}=open", "new": "client/u{}@new{}", "plain": "client/u{}"}
        for number, form in enumerate(kinds.values()):
            keys = [form.format(1000 * number + n, n) for n in range(40)]
            await queue.enqueue("replies", [(key, b"{}") for key in keys])
        taken: list[str] = []
        while len(taken) < 32:
            count = min(at_once, 32 - len(taken))
            taken += [job.key for job in await queue.exchange("worker", [], count, 100)]
        await queue.close()
    assert len(taken) == 32
    assert sum("=open" in key for key in taken) == 14
    assert sum("@new" in key for key in taken) == 2
    assert [n % 2 for n, key in enumerate(taken) if "=" not in key and "@" not in key] == [0] * 16


async def test_a_call_that_uses_much_cpu_is_demoted_with_all_its_processes(judge: JudgeService) -> None:
    workers = httpx.get(f"{judge.url}/status").json()["workers"]
    if any("cpu_cgroup" not in worker["isolation"]["active"] for worker in workers.values()):
        pytest.skip("no CPU groups")
    program = "import os\nif os.fork() == 0: os.setsid()\nwhile True: pass"

    def shares() -> set[int]:
        groups = Path("/sys/fs/cgroup").glob("cpu/**/rstar2-judge-*/slot-*/cpu.shares")
        weights = Path("/sys/fs/cgroup").glob("**/rstar2-judge-*/slot-*/cpu.weight")
        return {int(path.read_text()) * 100 // 1024 for path in groups} | {int(p.read_text()) for p in weights}

    async with JudgeClient(judge.url) as client:
        call = asyncio.create_task(client.run(program))
        await until(lambda: shares() & {0, 25}, "its group is idle, or has a quarter of a call's weight")
        assert (await call).outcome is Outcome.TIMEOUT


@pytest.fixture(scope="module")
def narrow() -> Iterator[JudgeService]:
    """Eight slots, one of which may compute."""
    with JudgeService(workers=8, time_limit_s=20.0, extra_arguments=("--max-running", "1", "--sessions", "400")) as judge:
        yield judge


async def _until_running(client: aiohttp.ClientSession, judge: JudgeService, count: int) -> None:
    async with asyncio.timeout(60):
        while True:
            async with client.get(f"{judge.url}/status") as response:
                workers = (await response.json())["workers"]
            if sum(worker["running"] for worker in workers.values()) >= count:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("program", ["import time; time.sleep(15)", "while True: pass"])
async def test_sleepers_and_endless_loops_do_not_hold_up_others(narrow: JudgeService, program: str) -> None:
    async with JudgeClient(narrow.url, time_limit_s=15.0) as client, aiohttp.ClientSession() as plain:
        crowd = [asyncio.create_task(client.run(program)) for _ in range(6)]
        await _until_running(plain, narrow, 6)  # although only one may compute
        assert (await client.run("print('in between')")).stdout == "in between\n"
        assert not any(call.done() for call in crowd)
        for call in crowd:
            call.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


async def test_what_may_compute_at_once_is_bounded_and_nothing_is_lost(narrow: JudgeService) -> None:
    async with JudgeClient(narrow.url) as client:
        results = await asyncio.gather(*(client.run(f"print({n})") for n in range(100)))
        sessions = await asyncio.gather(*(client.run(f"n = {n}; n", session=f"s{n % 5}") for n in range(40)))
        for n in range(5):
            await client.close_session(f"s{n}")
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(100)]
    assert [result.stdout for result in sessions] == [f"{n}\n" for n in range(40)]


async def test_a_slot_holds_no_descriptor_of_other_slots(narrow: JudgeService) -> None:
    assert narrow.process is not None
    service = psutil.Process(narrow.process.pid)
    depth = len(service.parents()) + 3  # service, worker, launcher, zygote, slots
    held = []
    for process in service.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a call of the test before that is just ending
            if len(process.parents()) > depth and not process.children():
                held.append(process.num_fds())
    assert len(held) >= 16  # two call parents for each slot
    assert max(held) < 20


async def test_a_permit_goes_first_to_waiting_calls() -> None:
    permits = FreeList([None])
    permits.take()
    first = Permit(permits)
    waiting = [asyncio.create_task(permits.get()) for _ in range(2)]
    await asyncio.sleep(0)
    first.release()
    first.release()  # counts once
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False]
    assert len(permits) == 0
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    Permit(permits).release()
    assert len(permits) == 1
