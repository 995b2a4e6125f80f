"""A judge whose worker runs in the test's own process, so that what it holds can be seen and held back."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from rstar2_megatron.judge.limits import CallLimits, Submission
from rstar2_megatron.judge.queue import JobQueue, Jobs, LeasedJob, cancel_and_wait
from rstar2_megatron.judge.scheduling import PrefetchedJobs
from rstar2_megatron.judge.server.broker import Broker, Ticket
from rstar2_megatron.judge.worker.worker import Worker
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.waiting import until

CHECK_S = 0.05  # between two looks for pending jobs


class WorkersQueue(JobQueue):
    """The worker's way to Redis, which a test can watch and slow down."""

    exchanges = 0  # that lease or acknowledge something
    may_return: asyncio.Event | None = None  # the answer to an acknowledgement waits for it
    bells = 0  # that were heard, or waited for in vain for two seconds
    deaf: asyncio.Event | None = None  # until it is set nobody listens for bells any more

    async def exchange(self, name: str, answers: list[Any], count: int, session_room: int = 0) -> list[LeasedJob]:
        jobs = await super().exchange(name, answers, count, session_room)
        self.exchanges += bool(jobs or answers)
        if self.may_return is not None and answers:
            async with asyncio.timeout(60):
                await self.may_return.wait()
        return jobs

    async def wait_for_bell(self, worker: str, may_open_sessions: bool) -> None:
        if self.deaf is not None:
            await self.deaf.wait()
        await super().wait_for_bell(worker, may_open_sessions)
        self.bells += 1


class BrokersQueue(JobQueue):
    """The broker's way to Redis, which a test can watch and slow down."""

    slow = ""  # the operation that takes as long as ten looks for pending jobs

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.again: list[str] = []  # keys of the jobs that were queued again
        self.withdrawn: list[int] = []  # number of keys in each request

    async def _wait(self, name: str) -> None:
        if self.slow == name:
            await asyncio.sleep(10 * CHECK_S)

    async def enqueue(self, reply: str, jobs: Jobs) -> int:
        await self._wait("enqueue")
        return await super().enqueue(reply, jobs)

    async def replies(self, reply: str, many: bool) -> tuple[list[tuple[str, bytes]], bool]:
        await self._wait("replies")
        return await super().replies(reply, many)

    async def enqueue_again(self, reply: str, jobs: Jobs) -> None:
        self.again += [key for key, _ in jobs]
        await super().enqueue_again(reply, jobs)

    async def withdraw(self, keys: list[str]) -> list[bool]:
        self.withdrawn.append(len(keys))
        return await super().withdraw(keys)


class Judge:
    """A broker and one worker in this process, over a real Redis and a real sandbox."""

    def __init__(self, broker: Broker, worker: Worker, ways: tuple[BrokersQueue, WorkersQueue]) -> None:
        self.broker, self.worker = broker, worker
        self.brokers_queue, self.workers_queue = ways
        self._held = 0

    async def submit(self, *programs: str, sessions: Sequence[str] = ()) -> list[Ticket]:
        """All at once; the last ones are cells of these sessions."""
        submissions = [Submission(type="python", solution=program) for program in programs]
        for number, session in enumerate(sessions, len(programs) - len(sessions)):
            submissions[number] = submissions[number]._replace(options={"session": session})
        return await self.broker.submit(submissions, "tests")

    async def results(self, tickets: list[Ticket]) -> list[dict[str, Any]]:
        async with asyncio.timeout(120):
            answers = [await self.broker.wait(ticket) for ticket in tickets]
        return [orjson.loads(answer) for answer in answers]

    async def hold(self) -> None:
        """From now on no call begins: takes all permits, as running calls give them back."""
        while self._held < self.worker.num_permits:
            await self.worker.permits.get()
            self._held += 1

    def let_begin(self) -> None:
        while self._held:
            self._held -= 1
            self.worker.permits.put(None)

    def prefetch_all(self) -> None:
        """As many jobs are leased as there are slots for: as if calls had ended at a high rate until now."""
        self.worker.prefetched.answered(1_000_000, time.monotonic())

    @contextlib.asynccontextmanager
    async def from_new(self) -> AsyncIterator[None]:
        """As it was at its start, before and after a test."""
        assert not (self.worker.running or self.worker.prefetched or self.broker.waiting), "an earlier test has left calls"
        try:
            yield
        finally:
            for name in self.worker.sessions.names:
                await self.broker.queue.end_session(name)
            await until(lambda: not len(self.worker.sessions), "all sessions have ended")
            self.let_begin()
            self.worker.prefetched = PrefetchedJobs(time.monotonic())
            for event in (self.workers_queue.may_return, self.workers_queue.deaf):
                if event is not None:
                    event.set()
            self.workers_queue.may_return = self.workers_queue.deaf = None
            self.brokers_queue.slow = ""
            self.brokers_queue.again.clear()
            self.brokers_queue.withdrawn.clear()


@contextlib.asynccontextmanager
async def judge(redis: RedisServer) -> AsyncIterator[Judge]:
    """Eight slots, two permits, four sessions; as many calls have ended as there are slots."""
    prefix = f"test-{uuid.uuid4().hex}:"
    ways = BrokersQueue(redis.uri, prefix=prefix), WorkersQueue(redis.uri, prefix=prefix)
    broker = Broker(ways[0], CallLimits(time_limit_s=60.0), queue_time_limit_s=50.0, check_s=CHECK_S)
    runner = Worker(ways[1], slots=8, sessions=4, permits=2)
    await runner.start()
    running = asyncio.create_task(runner.run())
    await broker.start()
    try:
        there = Judge(broker, runner, ways)
        warm = await there.submit(*["pass"] * 8)
        assert all(result["outcome"] == "ok" for result in await there.results(warm))
        channel = f"{prefix}cancel:{runner.name}"
        async with asyncio.timeout(60):
            while not (await ways[1].redis.pubsub_numsub(channel))[0][1]:
                await asyncio.sleep(0.01)
        yield there
    finally:
        await broker.stop()
        await runner.stop()
        await cancel_and_wait(running)
        await ways[1].close()
