"""A judge whose worker runs in the test's own process, so that its state can be seen and changed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from rstar2_megatron.judge.limits import CallLimits, Submission
from rstar2_megatron.judge.queue import JobQueue, LeasedJob, cancel_and_wait
from rstar2_megatron.judge.server.broker import Broker, Ticket
from rstar2_megatron.judge.worker.worker import Worker
from rstar2_megatron.services.redis_server import RedisServer


class Queue(JobQueue):
    """Counts the exchanges that lease or ack something."""

    exchanges = 0
    may_return: asyncio.Event | None = None  # Redis' next answer waits for it

    async def exchange(self, name: str, answers: list[Any], count: int, session_room: int = 0) -> list[LeasedJob]:
        jobs = await super().exchange(name, answers, count, session_room)
        self.exchanges += bool(jobs or answers)
        if self.may_return is not None and answers:
            async with asyncio.timeout(30):
                await self.may_return.wait()
        return jobs


class Judge:
    """A broker and one worker in this process, over a real Redis and a real sandbox."""

    def __init__(self, broker: Broker, worker: Worker, queue: Queue) -> None:
        self.broker, self.worker, self.queue = broker, worker, queue

    async def submit(self, *programs: str, sessions: Sequence[str] = ()) -> list[Ticket]:
        """All at once; the last ones are cells of these sessions."""
        submissions = [Submission(type="python", solution=program) for program in programs]
        for number, session in enumerate(sessions, len(programs) - len(sessions)):
            submissions[number] = submissions[number]._replace(options={"session": session})
        return await self.broker.submit(submissions, "tests")

    async def results(self, tickets: list[Ticket]) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            answers = [await self.broker.wait(ticket) for ticket in tickets]
        return [orjson.loads(answer) for answer in answers]


@contextlib.asynccontextmanager
async def judge(redis: RedisServer, *, permits: int, sessions: int = 0) -> AsyncIterator[Judge]:
    """Eight slots; as many calls have ended."""
    prefix = f"test-{time.monotonic_ns()}:"
    queue = Queue(redis.uri, prefix=prefix)
    broker = Broker(JobQueue(redis.uri, prefix=prefix), CallLimits(), queue_time_limit_s=50.0)
    runner = Worker(queue, slots=8, sessions=sessions, permits=permits)
    await runner.start()
    running = asyncio.create_task(runner.run())
    await broker.start()
    try:
        there = Judge(broker, runner, queue)
        warm = await there.submit(*["pass"] * 8)
        assert all(result["outcome"] == "ok" for result in await there.results(warm))
        channel = f"{prefix}cancel:{runner.name}"
        async with asyncio.timeout(30):
            while not (await queue.redis.pubsub_numsub(channel))[0][1]:
                await asyncio.sleep(0.01)
        yield there
    finally:
        await broker.stop()
        await runner.stop()
        await cancel_and_wait(running)
        await queue.close()
