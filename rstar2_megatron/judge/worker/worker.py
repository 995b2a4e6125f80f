"""A worker: takes jobs from Redis, runs each in a slot, acks it with its result.

One round trip to Redis acks what is done and leases what is next (`_exchange`), for all slots together; what is leased
begins as soon as there is a slot (`_go_on`).
A slot that dies in mid-call gets its job done once more in another slot; a worker that dies has its jobs put
back by whoever notices (`JobQueue.reap`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from typing import Any

import orjson
from redis.exceptions import RedisError

from rstar2_megatron.judge.limits import CallLimits, default_permits
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.judge.queue import HEARTBEAT_S, JobQueue, LeasedJob, until_redis_answers
from rstar2_megatron.judge.worker.permits import Permit, Permits
from rstar2_megatron.judge.worker.prefetch import ROUND_TRIP_S, PrefetchedJobs
from rstar2_megatron.judge.worker.sessions import SessionGone, Sessions
from rstar2_megatron.judge.worker.slots import IsolationMissing, Slot, SlotDied, SlotPool

log = logging.getLogger(__name__)
_GRACE_S = 10.0  # a slot that answers so much later than the call's limit is hung
_COMPARE_NAMES_EVERY = 30  # beats


class Worker:
    """Runs jobs until told to stop."""

    def __init__(
        self,
        queue: JobQueue,
        *,
        slots: int,
        sessions: int = 0,
        session_ttl_s: float = 900.0,
        require_isolation: str = "any",
        permits: int | None = None,
        name: str | None = None,
    ) -> None:
        """`starts` bounds the calls that neither sleep nor have used their slice of CPU (default_permits)."""
        self.queue = queue
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.pool = SlotPool(slots, sessions)
        self.permits = Permits(default_permits() if permits is None else permits)
        self.sessions = Sessions(self.pool, session_ttl_s)
        self.require_isolation = require_isolation
        self.prefetched = PrefetchedJobs(time.monotonic())
        self.running: dict[str, asyncio.Task[None]] = {}
        self.in_slot: dict[str, Slot] = {}
        self.calls = 0
        self.stopping = asyncio.Event()
        self._beats = 0
        self._differed = False  # at the last beat, Redis and this worker did not hold as many sessions
        self._unknown: set[str] = set()  # sessions that only Redis knew of at the last beat
        self._done: list[tuple[str, bytes]] = []  # answers that are not acked yet
        self._hungry = True  # jobs may wait
        self._wake = asyncio.Event()  # there is something to exchange
        self._exchange_later: asyncio.TimerHandle | None = None  # sets it, while there are jobs to begin
        self._idle = asyncio.Event()  # slots are free and the queue was empty
        self._slots_awaited = 0  # by jobs that have begun

    async def start(self) -> None:
        """Start the sandbox and check its walls. Raises SandboxFailed, IsolationMissing."""
        await self.pool.start()
        isolation = self.pool.description["isolation"]
        log.info("isolation %s: %s", isolation["level"], ", ".join(isolation["active"]))
        for layer, why in isolation["missing"].items():
            log.warning("isolation layer %s is missing: %s", layer, why)
        if self.require_isolation == "full" and isolation["level"] != "full":
            await self.pool.stop()
            missing = "; ".join(f"{layer}: {why}" for layer, why in isolation["missing"].items())
            raise IsolationMissing(
                f"--require-isolation full, but this machine gives {isolation['level']} ({missing}). "
                "Run as root with control groups, or ask for --require-isolation any"
            )
        await until_redis_answers("heartbeat", self._beat)

    @property
    def level(self) -> str:
        return str(self.pool.description["isolation"]["level"])

    def information(self) -> dict[str, Any]:
        """What /status shows of this worker."""
        return {
            "slots": self.pool.count,
            "starts": self.permits.count,
            "running": len(self.running),
            "ahead": len(self.prefetched),
            "sessions": len(self.sessions),
            "session_room": self.pool.session_room,
            "calls": self.calls,
            "cpp": self.pool.description.get("cpp", False),
            "isolation": self.pool.description.get("isolation", {}),
        }

    async def run(self) -> None:
        """Take and run jobs until cancelled; after `stop()` finished ones are still acked."""
        helpers = [
            asyncio.create_task(helper())
            for helper in (self._keep_alive, self._hear_cancellations, self._hear_bell)
        ]
        self.pool.on_free = self.permits.on_free = self._go_on
        self._wake.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._exchange()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def _go_on(self) -> None:
        """A slot or a start is free, or an answer is there: begin what was leased, and have an exchange follow."""
        while self.prefetched and self._has_room and not self.stopping.is_set():
            self._begin(self.prefetched.next())
        if not self.prefetched:
            self._wake.set()
        elif self._exchange_later is None:  # there is something to begin next: more may travel together
            later = asyncio.get_running_loop().call_later(ROUND_TRIP_S, self._wake.set)
            self._exchange_later = later

    def _begin(self, job: LeasedJob) -> None:
        slot, permit = self.pool.free.get_nowait(), self.permits.take()
        task = asyncio.create_task(self._execute(job, slot, permit))
        self.running[job.key] = task
        task.add_done_callback(lambda _: self.running.pop(job.key, None))

    async def _exchange(self) -> None:
        """One round trip: ack what is done, lease as many jobs as can begin now, and a few ahead."""
        if self._exchange_later is not None:
            self._exchange_later.cancel()
            self._exchange_later = None
        count = 0 if self.stopping.is_set() else self.prefetched.room(self._free_slots, self.permits.free)
        answers, self._done = self._done, []
        self.prefetched.answered(len(answers), time.monotonic())
        try:
            if answers or (count and self._hungry):
                jobs = await self._ask(answers, count)
                if count:
                    self._hungry = len(jobs) == count  # there may be more where they came from
                for job in jobs:
                    if job.key not in self.running:  # else Redis forgot that it runs here
                        self.prefetched.add(job)
                if jobs:
                    self._go_on()
        except (RedisError, OSError) as error:
            self._done = answers + self._done
            if not self.stopping.is_set():
                log.error("exchanging jobs failed: %s", error)
                await asyncio.sleep(0.5)
                self._wake.set()
        if not self._hungry and self._has_room:
            self._idle.set()

    @property
    def _has_room(self) -> bool:
        return self._free_slots > 0 and self.permits.free > 0

    @property
    def _free_slots(self) -> int:
        """Without those that a job begun before waits for."""
        return self.pool.free.qsize() - self._slots_awaited

    @property
    def _session_room(self) -> int:
        """Sessions that may be leased: without those that a job which is here already may open."""
        return self.pool.session_room - sum(name not in self.sessions for name in self._sessions_coming)

    @property
    def _sessions_coming(self) -> set[str]:
        """Sessions that a leased or running job opens, unless they are open by now."""
        return {key.rpartition("@")[2] for key in (*self.prefetched, *self.running) if "@" in key}

    async def _next_slot(self) -> Slot:
        """For a job that has begun already: it comes before all that are leased."""
        self._slots_awaited += 1
        try:
            return await self.pool.free.get()
        finally:
            self._slots_awaited -= 1

    async def _ask(self, answers: list[tuple[str, bytes]], count: int) -> list[LeasedJob]:
        """The exchange itself, repeated while Redis is away. What an answer that got lost held is put back."""
        certain = True

        async def step() -> list[LeasedJob]:
            nonlocal certain
            try:
                return await self.queue.exchange(self.name, answers, count, self._session_room)
            except BaseException:
                certain = False
                raise

        jobs = await until_redis_answers("exchange", step, self.stopping)
        if not certain:
            held = [
                *self.running,
                *self.prefetched,
                *(key for key, _ in self._done),
                *(job.key for job in jobs),
            ]
            again = await self.queue.reclaim(self.name, held)
            log.warning("Redis is back; %d jobs that never reached this worker are queued again", again)
        return jobs

    async def _hear_bell(self) -> None:
        """While slots are free and the queue was empty: wait until jobs may be there."""
        while True:
            await self._idle.wait()
            self._idle.clear()
            try:
                await until_redis_answers(
                    "bell", lambda: self.queue.wait_for_bell(self.name, self.pool.session_room > 0)
                )
                if not self._has_room:  # enough work by now: another worker's turn
                    await self.queue.ring()
            except (RedisError, OSError) as error:
                log.warning("waiting for jobs failed: %s", error)
                await asyncio.sleep(0.5)
            self._hungry = True
            self._wake.set()

    async def _execute(self, job: LeasedJob, slot: Slot, permit: Permit) -> None:
        """Run one job, once more if its slot dies, and ack it."""
        request = orjson.loads(job.payload)
        request["queue_seconds"] = max(0.0, time.time() - request.pop("queued_at"))
        request["worker"] = self.name
        limits = CallLimits.from_dict(request["limits"])
        compile_s = limits.compile_time_s if request["type"] == "cpp" else 0.0
        deadline_s = limits.time_limit_s + compile_s + _GRACE_S
        body = orjson.dumps(request)
        if "session" in request:
            answer = await self._run_in_session(job, request, body, slot, permit, deadline_s)
        else:
            try:
                answer = await self._run(job, request, body, slot, permit, deadline_s)
            finally:
                permit.release()
        self.calls += 1
        self._done.append((job.key, answer))
        self._go_on()

    async def _run(
        self,
        job: LeasedJob,
        request: dict[str, Any],
        body: bytes,
        slot: Slot,
        permit: Permit,
        deadline_s: float,
    ) -> bytes:
        for attempt in range(2):
            if attempt:
                slot = await self._next_slot()
            self.in_slot[job.key] = slot
            try:
                answer = await slot.run(body, deadline_s, permit.release)
                self.pool.free.put_nowait(slot)
                return answer
            except SlotDied as error:
                log.warning("%s, job %s, attempt %d", error, job.key, attempt + 1)
            except TimeoutError:
                log.error("slot %d is hung on job %s: replaced", slot.index, job.key)
                slot.close()
            finally:
                self.in_slot.pop(job.key, None)
        return self._failed(request, Outcome.INTERNAL_ERROR, "the process that ran this job died twice")

    async def _run_in_session(
        self,
        job: LeasedJob,
        request: dict[str, Any],
        body: bytes,
        slot: Slot,
        permit: Permit,
        deadline_s: float,
    ) -> bytes:
        """Run a cell. `slot` is its leave to use the machine: the session has a process of its own."""
        name, must_exist = request["session"], request["session_must_exist"]
        leave: Slot | None = slot
        if self.sessions.is_busy(name):  # waits without holding others up
            self.pool.free.put_nowait(slot)
            permit.release()
            leave = None
        async with self.sessions.turn(name):
            if leave is None:
                leave, permit = await self._next_slot(), await self.permits.acquire()
            try:
                for attempt in range(2):
                    is_new = name not in self.sessions
                    try:
                        return await self.sessions.run(
                            name, must_exist, job.key, body, deadline_s, permit.release
                        )
                    except SessionGone:
                        why = (
                            f"session {name} is not open here: its time to live is over, or its worker ended"
                        )
                        return self._failed(request, Outcome.SESSION_LOST, why)
                    except (SlotDied, TimeoutError) as error:
                        log.warning("session %s: %r, attempt %d", name, error, attempt + 1)
                        if must_exist or not is_new:
                            why = f"the process of session {name} died"
                            return self._failed(request, Outcome.SESSION_LOST, why)
                return self._failed(request, Outcome.INTERNAL_ERROR, f"session {name} does not start")
            finally:
                self.pool.free.put_nowait(leave)
                permit.release()
                if name not in self.sessions:
                    await self._forget_sessions([name])

    def _failed(self, request: dict[str, Any], outcome: Outcome, why: str) -> bytes:
        session = "lost" if "session" in request else None
        return orjson.dumps(
            make_result(request.get("sub_id"), outcome, stderr=why, worker=self.name, session=session)
        )

    async def _forget_sessions(self, names: list[str]) -> None:
        try:
            await self.queue.forget_sessions(self.name, names)
        except (RedisError, OSError) as error:
            log.warning("%d ended sessions are still known in Redis: %s", len(names), error)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._beat()
                await self.queue.reap()
            except (RedisError, OSError) as error:
                log.warning("heartbeat failed: %s", error)
            if not self.pool.alive:
                log.error("the sandbox is gone: this worker ends")
                self.stopping.set()
                await self.queue.retire(self.name)
                os._exit(70)

    async def _beat(self) -> None:
        known = await self.queue.heartbeat(self.name, self.information())
        if ended := self.sessions.end_idle():
            await self.queue.forget_sessions(self.name, ended)
        differs = known != len(self.sessions.names)
        self._beats += 1
        # Equal numbers may hide one that is missing and one too many, so now and then names are compared as well: at
        # two beats on end, which it takes to forget one.
        if (differs and self._differed) or self._beats % _COMPARE_NAMES_EVERY < 2:
            await self._agree_on_sessions()
        else:
            self._unknown = set()
        self._differed = differs

    async def _agree_on_sessions(self) -> None:
        """A restarted Redis may have forgotten what opened or ended in its last second.

        Where sessions come and go all the time the counts differ often and nothing is wrong, so a session is only
        forgotten that was known there and unknown here for two beats on end: none that is on its way.
        """
        for name in await self.queue.claim_sessions(self.name, self.sessions.names):
            if not self.sessions.is_busy(name):
                self.sessions.end(name)
        unknown = await self.queue.held_sessions(self.name) - set(self.sessions.names) - self._sessions_coming
        if gone := unknown & self._unknown:
            await self.queue.forget_sessions(self.name, list(gone))
        self._unknown = unknown

    async def _hear_cancellations(self) -> None:
        while True:
            try:
                async for key in self.queue.cancellations(self.name):
                    if key.startswith("@"):
                        await self._end_session(key[1:])
                    elif key in self.in_slot:
                        self.in_slot[key].cancel()
                    elif self.prefetched.drop(key):
                        # Redis drops the answer, and no longer counts the job as held.
                        self._done.append((key, b""))
                        self._go_on()
            except (RedisError, OSError) as error:
                log.debug("listening for cancellations failed: %s", error)
                await asyncio.sleep(0.5)

    async def _end_session(self, name: str) -> None:
        if self.sessions.end(name):
            await self._forget_sessions([name])

    async def stop(self, drain_s: float = 0.0) -> None:
        """Stop taking jobs, let running ones end for `drain_s`, end the sandbox, give back the rest."""
        self.stopping.set()
        if self.running and drain_s > 0:
            await asyncio.wait(list(self.running.values()), timeout=drain_s)
        interrupted = dict(self.running)  # another worker does them once more
        for task in interrupted.values():
            task.cancel()
        if interrupted:
            await asyncio.wait(list(interrupted.values()), timeout=2.0)
        await self.pool.stop()
        try:
            async with asyncio.timeout(2.0):
                if self._done:
                    await self.queue.exchange(self.name, self._done, 0)
                if self.prefetched:  # never begun: no try of theirs
                    await self.queue.reclaim(self.name, list(interrupted))
                await self.queue.retire(self.name)
        except (RedisError, TimeoutError, OSError):
            log.info("Redis is gone already")
