"""A call whose answer Redis has lost runs again; one whose answer is only late does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rstar2_megatron.judge.queue import Jobs
from rstar2_megatron.judge.server import broker as broker_module
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.in_process import Judge, judge


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "_CHECK_S", 0.05)


def count_again(there: Judge, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the jobs that are queued again from now on."""
    again: list[str] = []
    enqueue_again = there.broker.queue.enqueue_again

    async def counted(reply: str, jobs: Jobs) -> None:
        again.extend(key for key, _ in jobs)
        await enqueue_again(reply, jobs)

    monkeypatch.setattr(there.broker.queue, "enqueue_again", counted)
    return again


@pytest.mark.parametrize("slow", ["enqueue", "replies"])
async def test_a_slow_way_to_or_from_redis_loses_nothing(
    redis: RedisServer, checked_often: None, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    async with judge(redis, permits=2) as there:
        again = count_again(there, monkeypatch)
        real = getattr(there.broker.queue, slow)

        async def delayed(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(0.5)
            return await real(*arguments, **options)

        monkeypatch.setattr(there.broker.queue, slow, delayed)
        tickets = await there.submit(*["print(1)"] * 3)
        assert [result["outcome"] for result in await there.results(tickets)] == ["ok"] * 3
        assert again == []


async def test_a_job_that_redis_forgets_runs_again(
    redis: RedisServer, checked_often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judge(redis, permits=2) as there:
        again = count_again(there, monkeypatch)
        (ticket,) = await there.submit("import time; time.sleep(0.5); print(1)")
        await asyncio.sleep(0.2)
        await there.queue.redis.delete(f"{there.queue.prefix}jobs", f"{there.queue.prefix}owner")
        assert [result["outcome"] for result in await there.results([ticket])] == ["ok"]
        assert again == [ticket.key]
