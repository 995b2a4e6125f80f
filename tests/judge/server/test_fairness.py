"""Nobody starves: clients take turns, and a call that uses much CPU is demoted."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import psutil
import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.queue import JobQueue
from rstar2_megatron.judge.scheduling import FreeList, Permit
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.calls import HELD, MARK, control_group, let_go, processes, until_marked
from tests.judge.waiting import until


async def test_a_client_with_one_call_does_not_wait_for_one_with_many(judge: JudgeService) -> None:
    async with (
        JudgeClient(judge.url, time_limit_s=60.0, client_id="many") as many,
        JudgeClient(judge.url, client_id="one") as one,
    ):
        first = [asyncio.create_task(many.run(HELD)) for _ in range(2)]
        await until_marked(judge, 2)  # both slots are taken
        begun = "import time; print(time.monotonic_ns())"
        crowd = [asyncio.create_task(many.run(begun)) for _ in range(40)]
        late = asyncio.create_task(one.run(begun))

        async def queued() -> bool:
            status = await asyncio.to_thread(httpx.get, f"{judge.url}/status", trust_env=False)
            return bool(status.json()["queue"] == 41)

        await until(queued, "all others wait")
        await let_go(judge, *first)
        results = await asyncio.gather(*crowd, late)
        assert all(result.ok for result in results)
        *before, own = [int(result.stdout) for result in results]
        assert sum(moment < own for moment in before) < 20  # by when calls began: replies may be read in another order


@pytest.mark.parametrize("at_once", [1, 5, 32])
async def test_calls_that_open_sessions_come_last_but_come(redis: RedisServer, at_once: int) -> None:
    """Whose turn it is does not depend on how many jobs a worker takes at once."""
    queue = JobQueue(redis.uri, prefix=f"turns-{at_once}:")
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
    workers = httpx.get(f"{judge.url}/status", trust_env=False).json()["workers"]
    if any("cpu_cgroup" not in worker["isolation"]["active"] for worker in workers.values()):
        pytest.skip("no CPU groups")
    async with JudgeClient(judge.url, time_limit_s=60.0) as client:
        program = f"{MARK}import os\nif os.fork() == 0: os.setsid()\nwhile True: pass"
        call = asyncio.create_task(client.run(program))
        groups = {control_group(process, "cpu") for process in await until_marked(judge, 2)}
        (group,) = groups
        of_a_call = {group / "cpu.shares": 1024, group / "cpu.weight": 100}
        (weight,) = [path for path in of_a_call if path.exists()]
        idle = group / "cpu.idle"

        def is_demoted() -> bool:
            return (idle.exists() and idle.read_text() == "1\n") or int(weight.read_text()) == of_a_call[weight] // 4

        await until(is_demoted, "its group is idle, or has a quarter of a call's weight")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "while True: pass"])
async def test_sleepers_and_endless_loops_do_not_hold_up_others(crowded: JudgeService, program: str) -> None:
    async with JudgeClient(crowded.url, time_limit_s=60.0) as client:
        crowd = [asyncio.create_task(client.run(MARK + program)) for _ in range(8)]
        await until_marked(crowded, 8)  # although only three may compute
        assert (await client.run("print('in between')")).stdout == "in between\n"
        assert not any(call.done() for call in crowd)
        for call in crowd:
            call.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        await until_marked(crowded, 0)


async def test_what_may_compute_at_once_is_bounded_and_nothing_is_lost(crowded: JudgeService) -> None:
    async with JudgeClient(crowded.url, time_limit_s=60.0) as client:
        results = await asyncio.gather(*(client.run(f"print({n})") for n in range(100)))
        sessions = await asyncio.gather(*(client.run(f"n = {n}; n", session=f"s{n % 5}") for n in range(40)))
        for n in range(5):
            await client.close_session(f"s{n}")
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(100)]
    assert [result.stdout for result in sessions] == [f"{n}\n" for n in range(40)]


async def test_many_sessions_and_slots_have_their_descriptors_and_share_none(crowded: JudgeService) -> None:
    """Some are above 1,023, where select() ends. What calls are forked from has few: each call copies and closes them."""
    async with JudgeClient(crowded.url, time_limit_s=60.0) as client:
        results = await asyncio.gather(client.run("1"), client.run("import sympy; 2"), client.run("3", session="many"))
        assert [result.stdout for result in results] == ["1\n", "2\n", "3\n"]
        ended = await client.run("import os; os._exit(1)", session="many")
        assert ended.session == "lost" and (await client.run("4", session="many")).stdout == "4\n"
        await client.close_session("many")
        call = asyncio.create_task(client.run(HELD))
        (process,) = await until_marked(crowded, 1)
        parent = process.parent()
        assert parent is not None and parent.num_fds() < 20
        await let_go(crowded, call)
    numbers = []
    for process in processes(crowded):
        with contextlib.suppress(psutil.Error):  # it has just ended
            numbers.append(process.num_fds())
    assert max(numbers) > 1023


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
