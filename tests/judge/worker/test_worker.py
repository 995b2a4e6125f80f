"""What a worker leases before it can begin it: little, none of it lost or begun for nobody; whose sessions make room."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from rstar2_megatron.judge import queue
from rstar2_megatron.judge.limits import Submission
from rstar2_megatron.judge.queue import LeasedJob
from rstar2_megatron.judge.scheduling import PrefetchedJobs
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.calls import HELD, until_marked
from tests.judge.in_process import Judge, judge
from tests.judge.waiting import until

in_its_loop = pytest.mark.asyncio(loop_scope="module")


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
def test_jobs_that_begin_within_20_ms_are_prefetched(per_s: float, slots: int, permits: int, expected: int) -> None:
    assert after(per_s).num_to_lease(slots, permits) == expected


def test_jobs_that_are_here_take_room_and_begin_in_their_order() -> None:
    jobs = after(420)
    for key in ("a/u1", "a/u2@session", "b/k3"):
        jobs[key] = LeasedJob(key, b"")
    assert jobs.num_to_lease(16, 0) == 8 - 3
    assert list(jobs) == ["a/u1", "a/u2@session", "b/k3"]
    assert jobs.pop("a/u2@session") and not jobs.pop("a/u2@session", None)
    assert [jobs.take_first().key, jobs.take_first().key] == ["a/u1", "b/k3"] and not jobs


async def until_prefetched(there: Judge, count: int) -> None:
    await until(lambda: len(there.worker.prefetched) == count, f"{count} jobs are prefetched")


@in_its_loop
async def test_many_short_calls_share_round_trips(there: Judge) -> None:
    """Calls go on while an answer is on its way, and those that end meanwhile travel together."""
    await there.hold()
    there.prefetch_all()
    tickets = await there.submit(*(f"print({n})" for n in range(8)))
    await until_prefetched(there, 8)
    exchanges, calls = there.workers_queue.exchanges, there.worker.calls
    way_back = there.workers_queue.may_return = asyncio.Event()
    there.let_begin()
    await until(lambda: there.worker.calls == calls + 8, "all have ended")
    way_back.set()
    assert [result["stdout"] for result in await there.results(tickets)] == [f"{n}\n" for n in range(8)]
    assert there.workers_queue.exchanges - exchanges <= 2


@in_its_loop
async def test_one_that_nobody_waits_for_any_more_never_begins(there: Judge) -> None:
    await there.hold()
    there.prefetch_all()
    calls = there.worker.calls
    *kept, left = await there.submit("print(1)", "print(2)", "print(3)")
    await until_prefetched(there, 3)
    await there.broker.abandon([left])
    await until_prefetched(there, 2)
    there.let_begin()
    assert [result["outcome"] for result in await there.results(kept)] == ["ok"] * 2
    assert there.worker.calls == calls + 2 and not left.answer.done()
    # nor does Redis believe that it is held
    await until(lambda: _is_given_back(there, left.key), "it is acknowledged")


async def _is_given_back(there: Judge, key: str) -> bool:
    return key in await there.workers_queue.unknown([key]) and await there.workers_queue.reclaim(there.worker.name, []) == 0


@in_its_loop
async def test_a_worker_that_stops_gives_back_what_it_has_not_begun(redis: RedisServer) -> None:
    """That does not count as a try: a job whose worker has died twice is given up."""
    async with judge(redis) as there:
        (running,) = await there.submit(HELD)
        await until_marked(os.getpid(), 1)
        await there.hold()
        there.prefetch_all()
        waiting = await there.submit("print(1)", "print(2)")
        await until_prefetched(there, 2)
        await there.worker.stop()
        assert not running.answer.done(), "its interruption is no answer"
        others = there.workers_queue
        keys = {ticket.key for ticket in waiting}
        for leased in (keys, keys | {running.key}):  # the running call was tried once
            await others.heartbeat("another", {}, [])
            assert {job.key for job in await others.exchange("another", [], 10)} == leased
            await others.retire("another")
            await others.reap()
        assert [result["outcome"] for result in await there.results([running, *waiting])] == ["internal_error"] * 3


@pytest.mark.ci
@in_its_loop
async def test_no_more_sessions_are_leased_than_can_open(there: Judge) -> None:
    """Also while cells that will open a session are leased and have not begun."""
    await there.hold()
    there.prefetch_all()
    names = [f"s{n}" for n in range(6)]
    cells = await there.submit(*(f"n = {n}\nprint(n)" for n in range(6)), sessions=names)
    await until_prefetched(there, 4)
    there.let_begin()

    def done() -> list[int]:
        return [n for n, cell in enumerate(cells) if cell.answer.done()]

    await until(lambda: len(done()) == 4, "four are open")
    for ended in (1, 2):  # each that ends makes room for the next
        assert await there.broker.queue.end_session(there.worker.sessions.names[0])
        await until(lambda count=4 + ended: len(done()) == count, "another one opens")  # type: ignore[misc]
    results = await there.results(cells)
    assert [(result["stdout"], result["session"]) for result in results] == [(f"{n}\n", "new") for n in range(6)]


@in_its_loop
async def test_a_bell_during_a_round_trip_is_heard(there: Judge) -> None:
    ways = there.workers_queue
    way_back = ways.may_return = asyncio.Event()
    exchanges = ways.exchanges
    first = await there.submit("print(1)")
    await until(lambda: ways.exchanges >= exchanges + 2, "its answer is on its way to Redis and back")
    bells = ways.bells
    second = await there.submit("print(2)")
    await until(lambda: ways.bells > bells, "the bell has rung")
    ways.deaf = asyncio.Event()  # whoever did not hear it then never hears one again
    way_back.set()
    assert [result["stdout"] for result in await there.results(first + second)] == ["1\n", "2\n"]


@pytest.mark.ci
async def test_the_jobs_of_a_worker_that_is_silent_go_to_another(redis: RedisServer) -> None:
    there = queue.JobQueue(redis.uri, prefix="silent:")
    await there.heartbeat("silent", {}, [])
    await there.enqueue("server", [("client/u1", b"{}")])
    (job,) = await there.exchange("silent", [], 1)

    async def is_leased_by_another() -> bool:
        await there.heartbeat("another", {}, [])
        await there.reap()
        return await there.exchange("another", [], 1) == [job]

    assert not await is_leased_by_another()
    await until(is_leased_by_another, "the silent worker counts as dead")
    await there.close()


@pytest.mark.ci
@in_its_loop
async def test_idle_sessions_make_room_for_a_client_with_fewer(there: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(there.worker.sessions, "evictable_after_s", 0.0)

    async def cell(client: str, session: str, **options: str) -> str:
        submission = Submission("python", "1", options={"session": session, **options})
        (result,) = await there.results(await there.broker.submit([submission], client))
        return str(result["outcome"])

    for number in range(4):
        assert await cell(f"hog~{number}", f"hog{number}") == "ok"
    await cell("hog~0", "hog0")  # used last
    for number in range(2):
        assert await cell("other~", f"other{number}") == "ok"
    kept = [await cell("hog~", f"hog{n}", session_must_exist="true") for n in range(4)]
    assert kept == ["ok", "session_lost", "session_lost", "ok"]
    monkeypatch.setattr(there.broker, "queue_time_limit_s", 2.5)  # an equal share is not taken away
    assert await cell("other~", "other2") == "queue_timeout"


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
