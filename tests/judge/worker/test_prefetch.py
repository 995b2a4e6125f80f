"""Jobs that a worker leases before it can begin them: few, travelling together, none lost or begun for nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial

import orjson
import pytest

from rstar2_megatron.judge import queue, scheduling
from rstar2_megatron.judge.queue import LeasedJob
from rstar2_megatron.judge.scheduling import ROUND_TRIP_S, PrefetchedJobs
from rstar2_megatron.judge.worker import worker
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.in_process import Judge, judge
from tests.judge.waiting import until

soon = partial(until, every_s=0.001)  # a prefetched job begins within a tenth of a second

# Longer than anything that a test puts behind it takes to be noticed, shorter than a slice.
BURN = "import time\nwhile time.process_time() < 0.08: pass"


def after(per_s: float) -> PrefetchedJobs:
    """One that has seen `per_s` calls a second end for a while."""
    jobs = PrefetchedJobs(0.0)
    for second in range(1, 9):
        jobs.answered(round(per_s), float(second))
    return jobs


@pytest.mark.parametrize(
    ("per_s", "slots", "permits", "expected"),
    [
        (0, 16, 3, 3),  # nothing is known yet: what can begin
        (420, 16, 3, 3 + 8),  # 420 a second are 8 in 20 ms
        (420, 16, 0, 8),
        (420, 5, 3, 5),  # beyond the free slots there might be long waiting
        (420, 0, 3, 0),
        (40, 16, 3, 3),  # calls of 75 ms: none is begun so soon
        (420, -1, 3, 0),  # more wait for a slot than there are
    ],
)
def test_jobs_that_begin_within_a_round_trip_are_prefetched(per_s: float, slots: int, permits: int, expected: int) -> None:
    assert ROUND_TRIP_S == 0.02
    assert after(per_s).num_to_lease(slots, permits) == expected


def test_jobs_that_are_here_take_room_and_begin_in_their_order() -> None:
    jobs = after(420)
    for key in ("a/u1", "a/u2@session", "b/k3"):
        jobs[key] = LeasedJob(key, b"")
    assert jobs.num_to_lease(16, 0) == 8 - 3
    assert list(jobs) == ["a/u1", "a/u2@session", "b/k3"]
    assert jobs.pop("a/u2@session") and not jobs.pop("a/u2@session", None)
    assert [jobs.take_first().key, jobs.take_first().key] == ["a/u1", "b/k3"] and not jobs


async def tries(there: Judge, jobs: list[LeasedJob]) -> set[bytes]:
    """How often Redis has given these jobs to a worker."""
    counts = await there.queue.redis.hmget(f"{there.queue.prefix}tries", [job.key for job in jobs])
    return set(counts)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def prefetch_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that there are slots for are leased, however slow this machine is at the moment."""
    monkeypatch.setattr(scheduling, "ROUND_TRIP_S", 1000.0)
    monkeypatch.setattr(worker, "ROUND_TRIP_S", 1.0)


@pytest.mark.usefixtures("prefetch_all")
async def test_many_short_calls_share_round_trips(redis: RedisServer) -> None:
    async with judge(redis, permits=2) as there:
        before = there.queue.exchanges
        results = await there.results(await there.submit(*(f"print({n})" for n in range(84))))
        assert [result["stdout"] for result in results] == [f"{n}\n" for n in range(84)]
        assert there.queue.exchanges - before <= 84 / 3


@pytest.mark.usefixtures("prefetch_all")
async def test_one_that_nobody_waits_for_any_more_never_begins(redis: RedisServer) -> None:
    async with judge(redis, permits=1) as there:
        calls = there.worker.calls
        *kept, left = await there.submit(BURN, BURN, BURN, "print(1)", "print(2)")
        assert left.key is not None
        await soon(lambda: left.key in there.worker.prefetched, "it is prefetched")
        await there.broker.abandon([left])
        await soon(lambda: left.key not in there.worker.prefetched, "it is dropped")
        assert left.key not in there.worker.running
        assert [result["outcome"] for result in await there.results(kept)] == ["ok"] * 4
        assert there.worker.calls == calls + 4 and not left.answer.done()
        async with asyncio.timeout(10):  # nor does Redis believe that it is held
            while await there.queue.redis.scard(f"{there.queue.prefix}taken:{there.worker.name}"):
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("prefetch_all")
async def test_a_worker_that_stops_gives_back_what_it_has_not_begun(redis: RedisServer) -> None:
    async with judge(redis, permits=1) as there:
        running, *waiting = await there.submit(BURN, BURN, BURN, "print(1)", "print(2)")
        keys = {ticket.key for ticket in waiting}
        await soon(lambda: keys & set(there.worker.prefetched) != set(), "they are prefetched")
        await soon(lambda: running.key in there.worker.running, "the first one runs")
        begun = keys & set(there.worker.running)
        await there.worker.stop()
        assert not running.answer.done(), "its interruption is no answer"
        given_back = await there.queue.exchange("another", [], 10)
        assert {job.key for job in given_back} == keys - begun
        assert await tries(there, given_back) == {b"1"}, "a try was counted of what never began"
        await there.queue.reap()
        interrupted = await there.queue.exchange("another", [], 10)
        assert {job.key for job in interrupted} == begun | {running.key}
        assert await tries(there, interrupted) == {b"2"}


@pytest.mark.usefixtures("prefetch_all")
async def test_no_more_sessions_are_leased_than_can_open(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # An exchange follows each answer, also while cells that will open a session are leased and have not begun.
    monkeypatch.setattr(worker, "ROUND_TRIP_S", 0.001)
    async with judge(redis, permits=1, sessions=2) as there:
        programs = [BURN, BURN, BURN, *(f"n = {n}\nprint(n)" for n in range(4))]
        tickets = await there.submit(*programs, sessions=["s0", "s1", "s2", "s3"])
        burning, cells = tickets[:3], tickets[3:]

        def done(count: int) -> bool:
            return sum(cell.answer.done() for cell in cells) >= count

        await soon(partial(done, 2), "two are open")
        assert [result["outcome"] for result in await there.results(burning)] == ["ok"] * 3
        for ended in (1, 2):  # each that ends makes room for the next
            await asyncio.sleep(0.1)
            answers = [orjson.loads(cell.answer.result()) for cell in cells if cell.answer.done()]
            assert [answer["session"] for answer in answers] == ["new"] * (1 + ended)
            assert await there.broker.queue.end_session(there.worker.sessions.names[0])
            await soon(partial(done, 2 + ended), "another one opens")
        assert [result["stdout"] for result in await there.results(cells)] == [f"{n}\n" for n in range(4)]


async def test_a_bell_during_a_round_trip_is_heard(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_BLOCK_S", 9.0)  # a bell that is not heard costs so long
    async with judge(redis, permits=2) as there:
        bell = f"{there.queue.prefix}bell"
        there.queue.may_return = asyncio.Event()
        first = await there.submit("print(1)")
        exchanges = there.queue.exchanges
        await soon(lambda: there.queue.exchanges >= exchanges + 2, "its answer is on its way to Redis and back")
        second = await there.submit("print(2)")
        async with asyncio.timeout(5):
            while await there.queue.redis.llen(bell):
                await asyncio.sleep(0.01)
        there.queue.may_return.set()
        async with asyncio.timeout(5):
            assert [r["stdout"] for r in await there.results(first + second)] == ["1\n", "2\n"]


async def test_an_answer_for_lack_of_cpu_is_not_kept_for_a_retry(redis: RedisServer) -> None:
    there = queue.JobQueue(redis.uri, prefix="retry:")
    for outcome, again in (("queue_timeout", 1), ("ok", 0)):
        for expected in (1, again):
            await there.enqueue("server", [("client/kjob", b"{}")])
            jobs = await there.exchange("worker", [], 1)
            assert len(jobs) == expected
            answer = json.dumps({"outcome": outcome}).encode()
            await there.exchange("worker", [(job.key, answer) for job in jobs], 0)
    await there.close()


async def test_a_burst_reaches_redis_in_pieces(redis: RedisServer) -> None:
    """One command with all of it would pass the deadline of a command on a busy machine."""
    sizes = []

    class Seen(queue.JobQueue):
        async def enqueue(self, reply: str, jobs: queue.Jobs) -> int:
            sizes.append(sum(len(payload) for _, payload in jobs))
            return await super().enqueue(reply, jobs)

    there = Seen(redis.uri, prefix="burst:")
    sender = queue.Sender(there, "server")
    await asyncio.gather(*(sender.send([(f"client/k{n}", bytes(1 << 20))]) for n in range(12)))
    assert sum(sizes) == 12 << 20 and max(sizes) <= 5 << 20
    keys = [f"client/k{n}" for n in range(600)]
    assert await there.unknown(keys) == keys[12:]
    await there.close()
