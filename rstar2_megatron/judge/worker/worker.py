"""A worker: leases jobs from Redis, runs each in a slot, acknowledges it with its result.

One round trip to Redis serves all slots: it acknowledges finished jobs and leases new ones (`_exchange`). A leased job
begins as soon as a slot and a permit are free (`_begin_jobs`). When a slot dies during a call, the job runs once more in
another slot. When a worker dies, any live worker puts its jobs back into the queue (`JobQueue.reap`).
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

from rstar2_megatron.judge import libraries
from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.judge.queue import HEARTBEAT_S, JobQueue, LeasedJob, cancel_and_wait, until_redis_answers
from rstar2_megatron.judge.scheduling import ROUND_TRIP_S, FreeList, Permit, PrefetchedJobs
from rstar2_megatron.judge.worker.sessions import Call, SessionGone, Sessions
from rstar2_megatron.judge.worker.slots import Slot, SlotDied, SlotPool

log = logging.getLogger(__name__)
_GRACE_S = 10.0  # a slot that has not answered this long after the call's limit is hung


class Worker:
    """Runs jobs until told to stop."""

    def __init__(
        self,
        queue: JobQueue,
        *,
        slots: int,
        permits: int,
        sessions: int = 0,
        session_ttl_s: float = 900.0,
        require_isolation: str = "partial",
        name: str | None = None,
    ) -> None:
        """`permits` bounds the calls that neither sleep nor have used their slice of CPU."""
        self.queue = queue
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.pool = SlotPool(slots, sessions)
        self.num_permits = permits
        self.permits = FreeList([None] * permits)
        self.sessions = Sessions(self.pool, session_ttl_s)
        self.require_isolation = require_isolation
        self.libraries = libraries.versions()
        self.prefetched = PrefetchedJobs(time.monotonic())
        self.running: dict[str, asyncio.Task[None]] = {}
        self.in_slot: dict[str, Slot] = {}
        self.calls = 0
        self.stopping = asyncio.Event()
        self._done: list[tuple[str, bytes]] = []  # answers that are not acknowledged yet
        self._may_have_jobs = True  # the queue may hold jobs for this worker
        self._wake = asyncio.Event()  # an exchange is due
        self._exchange_later: asyncio.TimerHandle | None = None  # sets `_wake`, while prefetched jobs wait
        self._idle = asyncio.Event()  # slots are free and the queue was empty

    async def start(self) -> None:
        """Start the sandbox and check its isolation. Raises SandboxFailed."""
        await self.pool.start()
        await self.pool.check_isolation(self.require_isolation)
        await until_redis_answers("heartbeat", self._heartbeat)

    def information(self) -> dict[str, Any]:
        """The fields of this worker in /status."""
        return {
            "slots": self.pool.count,
            "starts": self.num_permits,
            "running": len(self.running),
            "ahead": len(self.prefetched),
            "sessions": len(self.sessions),
            "session_room": self.pool.session_room,
            "calls": self.calls,
            "cpp": self.pool.description.get("cpp", False),
            "isolation": self.pool.description.get("isolation", {}),
            "libraries": self.libraries,
        }

    async def run(self) -> None:
        """Lease and run jobs until cancelled; after `stop()` finished jobs are still acknowledged."""
        loops = (self._send_heartbeats, self._receive_cancellations, self._wait_for_jobs)
        helpers = [asyncio.create_task(loop()) for loop in loops]
        self.pool.free.on_free = self.permits.on_free = self._begin_jobs
        self._wake.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._exchange()
        finally:
            await cancel_and_wait(*helpers)

    def _begin_jobs(self) -> None:
        """Called when a slot or permit is free, or a call has ended: begin leased jobs, schedule an exchange."""
        while self.prefetched and self._can_begin and not self.stopping.is_set():
            self._begin(self.prefetched.take_first())
        if not self.prefetched:
            self._wake.set()
        elif self._exchange_later is None:  # no hurry: further answers may travel with it
            self._exchange_later = asyncio.get_running_loop().call_later(ROUND_TRIP_S, self._wake.set)

    def _begin(self, job: LeasedJob) -> None:
        self.permits.take()
        task = asyncio.create_task(self._execute(job, self.pool.free.take(), Permit(self.permits)))
        self.running[job.key] = task
        task.add_done_callback(lambda _: self.running.pop(job.key, None))

    async def _exchange(self) -> None:
        """One round trip: acknowledge finished jobs, lease those that can begin now and a few more."""
        if self._exchange_later is not None:
            self._exchange_later.cancel()
            self._exchange_later = None
        count = 0 if self.stopping.is_set() else self.prefetched.num_to_lease(len(self.pool.free), len(self.permits))
        answers, self._done = self._done, []
        self.prefetched.answered(len(answers), time.monotonic())
        try:
            if answers or (count and self._may_have_jobs):
                if count:  # lowered before asking: a bell may raise it while the answer is on its way
                    self._may_have_jobs = False
                jobs = await self._ask(answers, count)
                if count and len(jobs) == count:  # the queue may hold more
                    self._may_have_jobs = True
                for job in jobs:
                    if job.key not in self.running:  # else a restarted Redis forgot that it runs here
                        self.prefetched[job.key] = job
                if jobs:
                    self._begin_jobs()
        except (RedisError, OSError) as error:
            self._done = answers + self._done
            self._may_have_jobs = True
            if not self.stopping.is_set():
                log.error("exchanging jobs failed: %s", error)
                await asyncio.sleep(0.5)
                self._wake.set()
        if not self._may_have_jobs and self._can_begin:
            self._idle.set()

    @property
    def _can_begin(self) -> bool:
        return len(self.pool.free) > 0 and len(self.permits) > 0

    @property
    def _session_capacity(self) -> int:
        """Further sessions that jobs may open, those of leased and running jobs already subtracted."""
        return self.pool.session_room - sum(name not in self.sessions for name in self._opening_sessions)

    @property
    def _opening_sessions(self) -> set[str]:
        """Sessions that a leased or running job opens; some may be open by now."""
        return {key.rpartition("@")[2] for key in (*self.prefetched, *self.running) if "@" in key}

    async def _ask(self, answers: list[tuple[str, bytes]], count: int) -> list[LeasedJob]:
        """The exchange, repeated while Redis is away. Jobs of a lost answer are put back into the queue."""
        certain = True

        async def step() -> list[LeasedJob]:
            nonlocal certain
            try:
                return await self.queue.exchange(self.name, answers, count, self._session_capacity)
            except BaseException:
                certain = False
                raise

        jobs = await until_redis_answers("exchange", step, self.stopping)
        if not certain:
            held = [*self.running, *self.prefetched]
            held += [key for key, _ in self._done] + [job.key for job in jobs]
            again = await self.queue.reclaim(self.name, held)
            log.warning("Redis is back; %d jobs that never reached this worker are queued again", again)
        return jobs

    async def _wait_for_jobs(self) -> None:
        """While slots are free and the queue was empty: block until Redis signals new jobs."""
        while True:
            await self._idle.wait()
            self._idle.clear()
            try:
                await until_redis_answers("bell", lambda: self.queue.wait_for_bell(self.name, self.pool.session_room > 0))
                if not self._can_begin:  # this worker is busy by now: wake another
                    await self.queue.ring()
            except (RedisError, OSError) as error:
                log.warning("waiting for jobs failed: %s", error)
                await asyncio.sleep(0.5)
            self._may_have_jobs = True
            self._wake.set()

    async def _execute(self, job: LeasedJob, slot: Slot, permit: Permit) -> None:
        """Run one job, once more if its slot dies, and queue its answer for the next exchange."""
        request = orjson.loads(job.payload)
        request["queue_seconds"] = max(0.0, time.time() - request.pop("queued_at"))
        request["worker"] = self.name
        deadline_s = CallLimits.from_dict(request["limits"]).longest_s(request["type"]) + _GRACE_S
        call = Call(job.key, request, orjson.dumps(request), deadline_s)
        if "session" in request:
            answer = await self._run_in_session(call, slot, permit)
        else:
            try:
                answer = await self._run(call, slot, permit)
            finally:
                permit.release()
        self.calls += 1
        self._done.append((job.key, answer))
        self._begin_jobs()

    async def _run(self, call: Call, slot: Slot, permit: Permit) -> bytes:
        for attempt in range(2):
            if attempt:
                slot = await self.pool.free.get()
            self.in_slot[call.key] = slot
            try:
                answer = await slot.run(call.body, call.deadline_s, permit.release)
                self.pool.free.put(slot)
                return answer
            except SlotDied as error:
                log.warning("%s, job %s, attempt %d", error, call.key, attempt + 1)
            except TimeoutError:
                log.error("slot %d is hung on job %s: replaced", slot.index, call.key)
                slot.close()
            finally:
                self.in_slot.pop(call.key, None)
        return self._failed(call.request, Outcome.INTERNAL_ERROR, "the process that ran this job died twice")

    async def _run_in_session(self, call: Call, slot: Slot, permit: Permit) -> bytes:
        """Run a cell. It occupies `slot` without using its process: the session has a process of its own."""
        request = call.request
        name = request["session"]
        waits = self.sessions.is_busy(name)
        if waits:  # for its turn, without a slot or permit
            self.pool.free.put(slot)
            permit.release()
        async with self.sessions.turn(name):
            if waits:
                slot = await self.pool.free.get()
                await self.permits.get()
                permit = Permit(self.permits)
            try:
                for attempt in range(2):
                    is_new = name not in self.sessions
                    try:
                        return await self.sessions.run(call, permit.release)
                    except SessionGone as gone:
                        return self._failed(request, Outcome.SESSION_LOST, str(gone))
                    except (SlotDied, TimeoutError) as error:
                        log.warning("session %s: %r, attempt %d", name, error, attempt + 1)
                        if request["session_must_exist"] or not is_new:
                            return self._failed(request, Outcome.SESSION_LOST, f"session {name} died")
                return self._failed(request, Outcome.INTERNAL_ERROR, f"session {name} does not start")
            finally:
                self.pool.free.put(slot)
                permit.release()
                if name not in self.sessions:
                    await self._forget_sessions([name])

    def _failed(self, request: dict[str, Any], outcome: Outcome, why: str) -> bytes:
        sub_id, session = request.get("sub_id"), "lost" if "session" in request else None
        return orjson.dumps(make_result(sub_id, outcome, stderr=why, worker=self.name, session=session))

    async def _forget_sessions(self, names: list[str]) -> None:
        try:
            await self.queue.forget_sessions(self.name, names)
        except (RedisError, OSError) as error:
            log.warning("%d ended sessions are still known in Redis: %s", len(names), error)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._heartbeat()
                await self.queue.reap()
            except (RedisError, OSError) as error:
                log.warning("heartbeat failed: %s", error)
            # a worker that stops ends its sandbox itself
            if not self.pool.alive and not self.stopping.is_set():
                log.error("the sandbox is gone: this worker ends")
                self.stopping.set()
                try:
                    await self.queue.retire(self.name)
                finally:  # also where Redis is away
                    os._exit(70)

    async def _heartbeat(self) -> None:
        sessions = {*self.sessions.names, *self._opening_sessions}
        for name in await self.queue.heartbeat(self.name, self.information(), sessions):
            if not self.sessions.is_busy(name):
                self.sessions.end(name)
        ended = self.sessions.end_idle()
        if not self.pool.session_room:
            ended += self.sessions.make_room(await self.queue.waiting_openers())
        if ended:
            await self.queue.forget_sessions(self.name, ended)
            self._may_have_jobs = True
            self._wake.set()

    async def _receive_cancellations(self) -> None:
        while True:
            try:
                async for key in self.queue.cancellations(self.name):
                    if key.startswith("@"):
                        if self.sessions.end(key[1:]):
                            await self._forget_sessions([key[1:]])
                    elif key in self.in_slot:
                        self.in_slot[key].cancel()
                    elif self.prefetched.pop(key, None):
                        # The empty answer makes Redis remove the job from those of this worker.
                        self._done.append((key, b""))
                        self._begin_jobs()
            except (RedisError, OSError) as error:
                log.debug("listening for cancellations failed: %s", error)
                await asyncio.sleep(0.5)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Lease no more jobs, wait `drain_s` for running ones, end the sandbox, put the others back."""
        self.stopping.set()
        if self.running and drain_s > 0:
            await asyncio.wait(list(self.running.values()), timeout=drain_s)
        interrupted = dict(self.running)  # another worker runs them again
        for task in interrupted.values():
            task.cancel()
        if interrupted:
            await asyncio.wait(list(interrupted.values()), timeout=2.0)
        await self.pool.stop()
        try:
            async with asyncio.timeout(2.0):
                if self._done:
                    await self.queue.exchange(self.name, self._done, 0)
                if self.prefetched:  # never begun, so they do not count as tried
                    await self.queue.reclaim(self.name, list(interrupted))
                await self.queue.retire(self.name)
        except (RedisError, TimeoutError, OSError):
            log.info("Redis is gone already")
