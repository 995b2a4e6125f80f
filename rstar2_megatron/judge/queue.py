"""The job queue in Redis: leased with ack, fair between clients, idempotent by job key."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import orjson
from redis import asyncio as redis
from redis import exceptions
from redis.exceptions import RedisError

from rstar2_megatron.judge import scripts

log = logging.getLogger(__name__)
T = TypeVar("T")
Jobs = list[tuple[str, bytes]]  # key and payload of each
Request = tuple[Jobs, "asyncio.Future[None]"]

PREFIX = "rstar2:judge:"
HEARTBEAT_S = 1.0
HEARTBEAT_TTL_S = 6  # a worker without a heartbeat for so long has lost its jobs
MAX_TRIES = 2  # a job whose worker dies runs once more, then fails as poison
KEEP_ANSWER_S = 600
_READ_AT_ONCE = 256  # answers
_BLOCK_S = 2.0
_COMMAND_TIMEOUT_S = 10.0
_LONGEST_ENQUEUE_S = 10.0  # below a client's deadline, so that it reads the reason and comes again
_CONNECTIONS = 32
# Jobs, bytes: a round trip with many more would exceed its deadline on a busy machine.
_AT_ONCE, _BYTES_AT_ONCE = 256, 1 << 22
# What the scripts answer in place of a result: the job's worker died twice; its session is open nowhere.
POISON, LOST = b"!poison", b"!lost"

# Refusals of Redis that pass: it loads its data, runs a long script, lacks disk, memory or a replica.
_PASSING_STATES = ("LOADING", "BUSY", "UNKILLABLE", "MISCONF", "OOM", "READONLY", "NOREPLICAS", "MASTERDOWN")


def _parts(items: list[T]) -> Iterator[list[T]]:
    """The items in pieces of which none keeps Redis for long."""
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


class QueueFull(Exception):
    """The queue has reached `max_queued` jobs."""


class LeasedJob(NamedTuple):
    """A job that a worker has taken from the queue and has to acknowledge."""

    key: str
    payload: bytes


class JobQueue:
    """The queue as one server or worker uses it."""

    def __init__(self, uri: str, *, max_queued: int = 100_000, prefix: str = PREFIX) -> None:
        self.prefix = prefix
        self.max_queued = max_queued
        self._leased = 0  # jobs so far; decides which kind of call is next
        # This pool waits for a free connection; the plain one raises when all are in use.
        seconds = {"socket_timeout": _COMMAND_TIMEOUT_S, "socket_connect_timeout": 3.0, "timeout": _COMMAND_TIMEOUT_S}
        pool = redis.BlockingConnectionPool.from_url(uri, max_connections=_CONNECTIONS, **seconds)
        self.redis: Any = redis.Redis.from_pool(pool)
        self._scripts = {name: self.redis.register_script(text) for name, text in scripts.ALL.items()}

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._scripts[script](args=[self.prefix, *arguments])

    async def close(self) -> None:
        await self.redis.aclose()

    # ------------------------------------------------------------------------------------ for servers

    async def enqueue(self, reply: str, jobs: list[tuple[str, bytes]]) -> int:
        """Add jobs (key, payload) whose answers go to the list `reply`. Raises QueueFull, RedisError."""
        queued = int(await self._run("ENQUEUE", reply, self.max_queued, *itertools.chain(*jobs)))
        if queued < 0:
            raise QueueFull
        return queued

    async def enqueue_again(self, reply: str, jobs: Jobs) -> None:
        """Add jobs that the queue may know already: it ignores those."""
        for part in _parts(jobs):
            await self.enqueue(reply, part)

    async def withdraw(self, keys: list[str]) -> list[bool]:
        """Remove jobs that have not started. True for each that was removed."""
        return [bool(n) for n in await self._run("WITHDRAW", *keys)]

    async def cancel(self, keys: list[str]) -> None:
        """Drop jobs that nobody waits for any more. Their workers end the running ones."""
        await self._run("CANCEL", *keys)

    async def unknown(self, keys: list[str]) -> list[str]:
        """The keys that the queue does not know."""
        missing: list[bytes] = []
        for part in _parts(keys):
            missing += await self._run("UNKNOWN", *part)
        return [key.decode() for key in missing]

    async def end_session(self, session: str) -> bool:
        """Ask the worker of a session to end it. False when the session is open nowhere."""
        holder = await self.redis.hget(f"{self.prefix}sessions", session)
        if holder is not None:
            await self.redis.publish(f"{self.prefix}cancel:{holder.decode()}", f"@{session}")
        return holder is not None

    async def replies(self, reply: str, many: bool) -> tuple[list[tuple[str, bytes]], bool]:
        """Wait up to 2 s for answers: (job key, result JSON or POISON or LOST). True with them: no answer is left in Redis."""
        name = f"{self.prefix}replies:{reply}"
        first = await self.redis.blpop([name], timeout=_BLOCK_S)
        if first is None:
            return [], True
        more = (await self.redis.lpop(name, _READ_AT_ONCE) or []) if many else []
        answers = []
        for item in (first[1], *more):
            key, _, body = item.partition(b"\n")
            answers.append((key.decode(), body))
        return answers, many and len(more) < _READ_AT_ONCE

    async def directory(self) -> str:
        """Where Redis has its data. Raises RedisError."""
        return str((await self.redis.config_get("dir"))["dir"])

    async def status(self) -> dict[str, Any]:
        """Number of waiting jobs, and the information that each live worker has published."""
        names = sorted(name.decode() for name in await self.redis.smembers(f"{self.prefix}workers"))
        told = await self.redis.mget([f"{self.prefix}alive:{name}" for name in names]) if names else []
        queued = int(await self.redis.get(f"{self.prefix}queued") or 0)
        workers = {name: orjson.loads(info) for name, info in zip(names, told, strict=True) if info}
        return {"queue": queued, "workers": workers}

    # ------------------------------------------------------------------------------------ for workers

    async def exchange(
        self, worker: str, answers: list[tuple[str, bytes]], count: int, session_room: int = 0
    ) -> list[LeasedJob]:
        """Acknowledge jobs with their answers, and lease up to `count` others, `session_room` of which may open a session."""
        numbers = (count, session_room, KEEP_ANSWER_S, self._leased)
        flat = await self._run("EXCHANGE", worker, *numbers, *itertools.chain(*answers))
        jobs = [LeasedJob(key.decode(), payload) for key, payload in zip(flat[::2], flat[1::2], strict=True)]
        self._leased += len(jobs)
        return jobs

    async def reclaim(self, worker: str, held: list[str]) -> int:
        """Requeue jobs that were leased to `worker` and are not in `held`: they never arrived. Returns their number."""
        return int(await self._run("RECLAIM", worker, *held))

    async def wait_for_bell(self, worker: str, may_open_sessions: bool) -> None:
        """Wait until jobs may be waiting, for at most 2 s."""
        bells = [f"{self.prefix}bell:{worker}", f"{self.prefix}bell"]
        if may_open_sessions:
            bells.append(f"{self.prefix}sbell")
        await self.redis.blpop(bells, timeout=_BLOCK_S)

    async def ring(self) -> None:
        """Wake an idle worker when jobs are waiting."""
        await self._run("RING")

    async def cancellations(self, worker: str) -> AsyncIterator[str]:
        """Keys of this worker's jobs that nobody waits for any more, and "@NAME" of sessions to end. Raises RedisError."""
        async with self.redis.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(f"{self.prefix}cancel:{worker}")
            while True:
                message = await channel.get_message(timeout=_BLOCK_S)
                if message is not None:
                    yield message["data"].decode()

    async def heartbeat(self, worker: str, info: dict[str, Any], sessions: Iterable[str]) -> list[str]:
        """Record that this worker is alive with these sessions, open or about to be; Redis forgets others at the second time.

        Returns those that another live worker has opened meanwhile.
        """
        elsewhere = await self._run("HEARTBEAT", worker, HEARTBEAT_TTL_S, orjson.dumps(info), *sessions)
        return [name.decode() for name in elsewhere]

    async def waiting_openers(self) -> dict[str, int]:
        """Client -> number of its jobs that wait to open a session."""
        openers = {}
        for owner in await self.redis.lrange(f"{self.prefix}sring", 0, -1):
            for client in await self.redis.lrange(f"{self.prefix}sring:{owner.decode()}", 0, -1):
                openers[client.decode()] = await self.redis.llen(f"{self.prefix}squeue:{client.decode()}")
        return openers

    async def forget_sessions(self, worker: str, sessions: list[str]) -> None:
        """Record that these sessions have ended at `worker`."""
        await self._run("FORGET_SESSIONS", worker, *sessions)

    async def retire(self, worker: str) -> None:
        """Mark this worker as dead, so that the next `reap` requeues its jobs."""
        await self.redis.delete(f"{self.prefix}alive:{worker}")

    async def reap(self) -> tuple[int, int]:
        """Requeue the jobs of dead workers. Returns (requeued, failed)."""
        back, failed = await self._run("REAP", MAX_TRIES)
        if back or failed:
            log.warning("jobs of a dead worker: %d put back, %d failed", back, failed)
        return int(back), int(failed)


async def until_redis_answers(
    what: str, step: Callable[[], Awaitable[T]], stop: asyncio.Event | None = None, limit_s: float = float("inf")
) -> T:
    """Repeat `step` while Redis is away or refuses, with waits that grow to a second. Other errors are raised.

    After `limit_s` these are raised too.
    """
    pause_s, told, end = 0.05, False, time.monotonic() + limit_s
    while True:
        try:
            return await step()
        except (RedisError, OSError) as error:
            is_away = isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError))
            passes = is_away or any(word in str(error) for word in _PASSING_STATES)
            if not passes or (stop is not None and stop.is_set()) or time.monotonic() > end:
                raise
            if not told:
                log.warning("%s: Redis %s (%s), waiting", what, "is away" if is_away else "refuses", error)
                told = True
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 1.0)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until all of them have ended. Their results and exceptions are dropped.

    One cancellation is not enough for a task that talks to Redis: redis-py sends by `asyncio.wait_for`, which before Python
    3.12 returns the result and forgets the cancellation when both arrive together. The task would go on for ever.
    """
    pending: Collection[asyncio.Future[Any]] = tasks
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
    await asyncio.gather(*tasks, return_exceptions=True)


class Sender:
    """Puts jobs into the queue. Collects requests while a round trip is in flight, and sends them in the next one."""

    def __init__(self, queue: JobQueue, reply: str) -> None:
        self._queue = queue
        self._reply = reply
        self._unsent: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None

    async def send(self, jobs: Jobs) -> None:
        """Put jobs into the queue. Raises QueueFull, RedisError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsent.append((jobs, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())
        await done

    async def stop(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def _send_all(self) -> None:
        while self._unsent:
            requests, size = [], 0
            while self._unsent and size < _BYTES_AT_ONCE:
                request = self._unsent.popleft()
                if not request[1].done():  # the client may have left
                    requests.append(request)
                    size += sum(len(payload) for _, payload in request[0])
            try:
                if requests:
                    await self._send_together(requests)
            except BaseException as error:
                for _, done in requests:
                    if not done.done():
                        done.set_exception(error)

    async def _send_together(self, requests: list[Request]) -> None:
        jobs = [job for part, _ in requests for job in part]
        refusal: QueueFull | None = None
        try:
            enqueue = functools.partial(self._queue.enqueue, self._reply, jobs)
            await until_redis_answers("enqueue", enqueue, limit_s=_LONGEST_ENQUEUE_S)
        except QueueFull as full:
            if len(requests) > 1:  # some requests may fit alone
                for request in requests:
                    await self._send_together([request])
                return
            refusal = full
        for _, done in requests:
            if not done.done() and refusal is not None:
                done.set_exception(refusal)
            elif not done.done():
                done.set_result(None)
