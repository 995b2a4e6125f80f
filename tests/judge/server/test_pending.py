"""How long a call may wait in the queue and what that costs; a call whose answer Redis has lost runs again."""

from __future__ import annotations

import asyncio
import os

import orjson
import pytest

from rstar2_megatron.judge.limits import Submission
from tests.judge.calls import HELD, let_go, until_marked
from tests.judge.in_process import Judge
from tests.judge.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("slow", ["enqueue", "replies"])
async def test_a_slow_way_to_or_from_redis_loses_nothing(there: Judge, slow: str) -> None:
    there.brokers_queue.slow = slow
    tickets = await there.submit(*["print(1)"] * 3)
    assert [result["outcome"] for result in await there.results(tickets)] == ["ok"] * 3
    assert there.brokers_queue.again == []


@pytest.mark.ci
async def test_a_job_that_redis_forgets_is_queued_again(there: Judge) -> None:
    """A worker that still runs it does not run it twice."""
    (ticket,) = await there.submit(HELD)
    result = asyncio.ensure_future(there.results([ticket]))
    await until_marked(os.getpid(), 1)
    leases = there.workers_queue.exchanges
    await there.workers_queue.redis.flushdb()
    await until(lambda: there.workers_queue.exchanges == leases + 1, "it is leased again")
    assert there.brokers_queue.again == [ticket.key]
    ((told,),) = await let_go(os.getpid(), result)
    assert told["stdout"] == "done\n"


async def test_a_long_batch_waits_on_and_the_others_leave_in_one_request(there: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    await there.hold()
    monkeypatch.setattr(there.broker, "queue_time_limit_s", 0.2)
    program = [Submission("python", "1 + 1")]
    short = await there.broker.submit(program * 20, "tests")
    long = await there.broker.submit(program * 3, "tests", long=True)
    waiting = asyncio.gather(*map(there.broker.wait, long))
    async with asyncio.timeout(60):
        left = await asyncio.gather(*map(there.broker.wait, short))
        there.let_begin()
        stayed = await waiting
    assert [orjson.loads(answer)["outcome"] for answer in (*left, *stayed)] == ["queue_timeout"] * 20 + ["ok"] * 3
    requests = there.brokers_queue.withdrawn
    assert sum(requests) == 20 and len(requests) <= 3
