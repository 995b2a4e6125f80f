"""Loops that talk to Redis end when they are told to."""

from __future__ import annotations

import asyncio

import pytest

from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.queue import JobQueue, cancel_and_wait
from rstar2_megatron.judge.server.broker import Broker
from rstar2_megatron.services.redis_server import RedisServer


async def test_a_task_that_forgets_its_cancellation_ends_all_the_same() -> None:
    async def works() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    async def fails() -> None:
        raise ValueError

    tasks = [asyncio.create_task(works()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancel_and_wait(*tasks)
    assert tasks[0].cancelled() and isinstance(tasks[1].exception(), ValueError)
    await cancel_and_wait()


async def test_a_broker_stops_at_whatever_turn_of_its_loops() -> None:
    """redis-py's sending loses a cancellation that arrives in one certain turn of the event loop."""
    with RedisServer() as redis:
        for turns in range(40):
            broker = Broker(JobQueue(redis.uri), CallLimits(), queue_time_limit_s=5.0)
            await broker.queue.redis.ping()  # connected: the loops begin at once
            await broker.start()
            for _ in range(turns):
                await asyncio.sleep(0)
            try:
                async with asyncio.timeout(10):
                    await broker.stop()
            except TimeoutError:
                pytest.fail(f"told to stop after {turns} turns, it goes on")
