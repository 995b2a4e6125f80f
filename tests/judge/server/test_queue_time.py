"""How long a call may wait in the queue, what its waiting costs, and what one client may take of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import orjson
import pytest
from fastapi import Request

from rstar2_megatron.judge.limits import Submission
from rstar2_megatron.judge.queue import JobQueue, QueueFull
from rstar2_megatron.judge.server.app import client_name, create_app
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.in_process import Judge
from tests.judge.in_process import judge as in_process


@pytest.fixture
async def there() -> AsyncIterator[Judge]:
    with RedisServer() as redis:
        async with in_process(redis, permits=8) as judge:
            yield judge


async def test_a_long_batch_waits_on_and_the_others_leave_in_one_request(there: Judge) -> None:
    requests = []
    withdraw = there.broker.queue.withdraw

    async def counted(keys: list[str]) -> list[bool]:
        requests.append(len(keys))
        return await withdraw(keys)

    there.broker.queue.withdraw = counted  # type: ignore[method-assign]
    busy = await there.submit(*["import time; time.sleep(2)"] * 8)
    while len(there.worker.running) < 8:
        await asyncio.sleep(0.01)
    there.broker.queue_time_limit_s = 0.4  # of calls from now on
    program = [Submission("python", "1 + 1")]
    short = await there.broker.submit(program * 20, "tests")
    long = await there.broker.submit(program * 3, "tests", long=True)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*map(there.broker.wait, [*short, *long, *busy]))
    outcomes = [orjson.loads(answer)["outcome"] for answer in answers]
    assert outcomes == ["queue_timeout"] * 20 + ["ok"] * 11
    assert sum(requests) == 20 and len(requests) <= 3


async def test_an_owner_takes_half_of_the_queue_under_any_number_of_names(there: Judge) -> None:
    there.broker.queue.max_queued = 40
    await there.submit(*["import time; time.sleep(2)"] * 8)
    while len(there.worker.running) < 8:
        await asyncio.sleep(0.01)
    queue = there.broker.queue
    greedy = [f"greedy~{n}/u{n}" for n in range(20)]
    assert await queue.enqueue("replies", [(key, b"{}") for key in greedy]) == 20
    with pytest.raises(QueueFull):
        await queue.enqueue("replies", [("greedy~new/u20", b"{}")])
    assert await queue.enqueue("replies", [("other~/u21", b"{}")]) == 21
    order = [job.key.split("~")[0] for job in await queue.exchange("worker", [], 3)]
    assert sorted(order[:2]) == ["greedy", "other"]  # it also gets its turn at once


async def test_a_job_that_was_withdrawn_and_submitted_again_runs_once(there: Judge) -> None:
    queue = JobQueue(there.queue.uri, prefix="withdrawn:")
    await queue.enqueue("replies", [("client~/k1", b"{}"), ("client~/k2", b"{}")])
    assert await queue.withdraw(["client~/k1", "client~/k3"]) == [True, False]
    assert await queue.enqueue("replies", [("client~/k1", b"{}")]) == 2
    leased = [job.key for _ in range(2) for job in await queue.exchange("worker", [], 8)]
    assert leased == ["client~/k1", "client~/k2"]
    await queue.cancel(leased)
    assert (await queue.status())["queue"] == 0 and not await queue.redis.exists("withdrawn:shares")
    await queue.close()


async def test_the_owner_of_a_call_is_named_by_its_token() -> None:
    app = create_app("redis://127.0.0.1:9/0", token="ann:one,two")

    @app.get("/who")
    async def who(request: Request) -> str:
        return client_name(request)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://judge") as http:
        for token, expected in {"ann:one": "ann~two_x", "two": "token~two_x", "one": None, "": None}.items():
            headers = {"Authorization": f"Bearer {token}", "X-Client-Id": "two~x"}
            answer = await http.get("/who", headers=headers)
            assert answer.status_code == (200 if expected else 401)
            assert expected is None or answer.json() == expected
