"""The job queue in Redis: leased with ack, fair between clients, idempotent by job key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from redis import asyncio as redis
from redis import exceptions
from redis.exceptions import RedisError

from rstar2_megatron.judge import scripts

log = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = "rstar2:judge:"
HEARTBEAT_S = 1.0
HEARTBEAT_TTL_S = 6  # a worker silent for so long has lost its jobs
MAX_TRIES = 2  # a job whose worker dies is done once more, then fails as poison
KEEP_ANSWER_S = 600
_BLOCK_S = 2.0
_COMMAND_TIMEOUT_S = 10.0
_CONNECTIONS = 32
# What Redis itself says in place of a result: a job's worker died twice; its session is open nowhere.
POISON, LOST = b"!poison", b"!lost"


# Refusals that end without us: it loads its data, runs a long script, has no disk or memory left, has no replica.
_PASSING_STATES = ("LOADING", "BUSY", "UNKILLABLE", "MISCONF", "OOM", "READONLY", "NOREPLICAS", "MASTERDOWN")


class QueueFull(Exception):
    """The queue holds as many jobs as it may."""


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A job that a worker has taken from the queue and has to acknowledge."""

    key: str
    payload: bytes


class JobQueue:
    """One process's view of the queue."""

    def __init__(self, uri: str, *, max_queued: int = 100_000, prefix: str = PREFIX) -> None:
        self.uri = uri
        self.prefix = prefix
        self.max_queued = max_queued
        self._leased = 0  # jobs so far: whose turn it is
        # A bounded pool that waits for a free connection: the plain one fails when many requests meet.
        pool = redis.BlockingConnectionPool.from_url(
            uri,
            socket_timeout=_COMMAND_TIMEOUT_S,
            socket_connect_timeout=3.0,
            max_connections=_CONNECTIONS,
            timeout=_COMMAND_TIMEOUT_S,
        )
        self.redis: Any = redis.Redis.from_pool(pool)
        self._enqueue = self.redis.register_script(scripts.ENQUEUE)
        self._exchange = self.redis.register_script(scripts.EXCHANGE)
        self._ring = self.redis.register_script(scripts.RING)
        self._reclaim = self.redis.register_script(scripts.RECLAIM)
        self._withdraw = self.redis.register_script(scripts.WITHDRAW)
        self._cancel = self.redis.register_script(scripts.CANCEL)
        self._heartbeat = self.redis.register_script(scripts.HEARTBEAT)
        self._reap = self.redis.register_script(scripts.REAP)
        self._claim_sessions = self.redis.register_script(scripts.CLAIM_SESSIONS)
        self._forget_sessions = self.redis.register_script(scripts.FORGET_SESSIONS)
        self._end_session = self.redis.register_script(scripts.END_SESSION)

    async def close(self) -> None:
        await self.redis.aclose()

    # ------------------------------------------------------------------------------------ for servers

    async def enqueue(self, reply: str, jobs: list[tuple[str, bytes]]) -> int:
        """Add jobs (key, payload) whose answers go to the list `reply`. Raises QueueFull, RedisError."""
        arguments: list[Any] = [self.prefix, reply, self.max_queued]
        for key, payload in jobs:
            arguments += (key, payload)
        queued = int(await self._enqueue(args=arguments))
        if queued < 0:
            raise QueueFull
        return queued

    async def withdraw(self, keys: list[str]) -> list[bool]:
        """Take back jobs; for each, True when it was waiting still."""
        return [bool(n) for n in await self._withdraw(args=[self.prefix, *keys])]

    async def cancel(self, keys: list[str]) -> None:
        """Forget jobs that nobody waits for; those that run are ended by their worker."""
        await self._cancel(args=[self.prefix, *keys])

    async def unknown(self, keys: list[str]) -> list[str]:
        """Those keys that are no job of the queue (any more)."""
        if not keys:
            return []
        known = await self.redis.hmget(f"{self.prefix}jobs", keys)
        return [key for key, payload in zip(keys, known, strict=True) if payload is None]

    async def end_session(self, session: str) -> bool:
        """Have its worker end a session. False when no worker has it."""
        return bool(await self._end_session(args=[self.prefix, session]))

    async def replies(self, reply: str, many: bool) -> list[tuple[str, bytes]]:
        """Wait a little for answers: (job key, result JSON, or POISON, or LOST)."""
        name = f"{self.prefix}replies:{reply}"
        first = await self.redis.blpop([name], timeout=_BLOCK_S)
        if first is None:
            return []
        raw = [first[1]]
        if many:
            raw += await self.redis.lpop(name, 256) or []
        answers = []
        for item in raw:
            key, _, body = item.partition(b"\n")
            answers.append((key.decode(), body))
        return answers

    async def cached(self, names: list[str]) -> list[bytes | None]:
        """Kept results of identical calls, where there are any."""
        return list(await self.redis.mget([f"{self.prefix}cache:{name}" for name in names])) if names else []

    async def remember(self, results: list[tuple[str, bytes]], seconds: float) -> None:
        """Keep results for identical calls."""
        async with self.redis.pipeline(transaction=False) as pipeline:
            for name, result in results:
                pipeline.set(f"{self.prefix}cache:{name}", result, px=round(seconds * 1000))
            await pipeline.execute()

    async def status(self) -> dict[str, Any]:
        """Jobs waiting, and what each live worker tells of itself."""
        names = sorted(name.decode() for name in await self.redis.smembers(f"{self.prefix}workers"))
        told = await self.redis.mget([f"{self.prefix}alive:{name}" for name in names]) if names else []
        queued = int(await self.redis.get(f"{self.prefix}queued") or 0)
        workers = {name: orjson.loads(info) for name, info in zip(names, told, strict=True) if info}
        return {"queue": queued, "workers": workers}

    # ------------------------------------------------------------------------------------ for workers

    async def exchange(
        self, worker: str, answers: list[tuple[str, bytes]], count: int, session_room: int = 0
    ) -> list[LeasedJob]:
        """Ack jobs with their answers, and lease up to `count` others, `session_room` of which may open a session."""
        arguments: list[Any] = [self.prefix, worker, count, session_room, KEEP_ANSWER_S, self._leased]
        for key, answer in answers:
            arguments += (key, answer)
        flat = await self._exchange(args=arguments)
        jobs = [LeasedJob(flat[i].decode(), flat[i + 1]) for i in range(0, len(flat), 3)]
        self._leased += len(jobs)
        return jobs

    async def reclaim(self, worker: str, held: list[str]) -> int:
        """Put back jobs that Redis gave to `worker` and that never reached it. Returns how many."""
        return int(await self._reclaim(args=[self.prefix, worker, *held]))

    async def wait_for_bell(self, worker: str, may_open_sessions: bool) -> None:
        """Until jobs may be there, or a little while."""
        bells = [f"{self.prefix}bell:{worker}", f"{self.prefix}bell"]
        if may_open_sessions:
            bells.append(f"{self.prefix}sbell")
        await self.redis.blpop(bells, timeout=_BLOCK_S)

    async def ring(self) -> None:
        """Wake another idle worker, if jobs wait."""
        await self._ring(args=[self.prefix])

    async def cancellations(self, worker: str) -> AsyncIterator[str]:
        """Keys of jobs that this worker runs and nobody waits for. Raises RedisError when Redis goes away."""
        async with self.redis.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(f"{self.prefix}cancel:{worker}")
            while True:
                message = await channel.get_message(timeout=_BLOCK_S)
                if message is not None:
                    yield message["data"].decode()

    async def heartbeat(self, worker: str, info: dict[str, Any]) -> int:
        """This worker is alive. Returns how many sessions Redis knows it to hold."""
        return int(await self._heartbeat(args=[self.prefix, worker, HEARTBEAT_TTL_S, orjson.dumps(info)]))

    async def claim_sessions(self, worker: str, sessions: list[str]) -> list[str]:
        """These sessions are open at `worker`. Returns those that another one has opened since Redis forgot them."""
        elsewhere = await self._claim_sessions(args=[self.prefix, worker, *sessions])
        return [name.decode() for name in elsewhere]

    async def held_sessions(self, worker: str) -> set[str]:
        """The sessions that Redis knows `worker` to hold."""
        return {name.decode() for name in await self.redis.smembers(f"{self.prefix}held:{worker}")}

    async def forget_sessions(self, worker: str, sessions: list[str]) -> None:
        """These sessions have ended at `worker`."""
        await self._forget_sessions(args=[self.prefix, worker, *sessions])

    async def retire(self, worker: str) -> None:
        """This worker is gone: whoever reaps next puts its jobs back at once."""
        await self.redis.delete(f"{self.prefix}alive:{worker}")

    async def reap(self) -> tuple[int, int]:
        """Put back the jobs of dead workers. Returns (put back, failed as poison)."""
        back, failed = await self._reap(args=[self.prefix, MAX_TRIES])
        if back or failed:
            log.warning("jobs of a dead worker: %d put back, %d failed", back, failed)
        return int(back), int(failed)


async def until_redis_answers(
    what: str, step: Callable[[], Awaitable[T]], stop: asyncio.Event | None = None
) -> T:
    """Repeat `step` while Redis is away or refuses (short waits, growing to a second). Other errors pass through."""
    pause_s, told = 0.05, False
    while True:
        try:
            return await step()
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            if stop is not None and stop.is_set():
                raise
            if not told:
                log.warning("%s: Redis is away (%s), waiting", what, error)
                told = True
        except RedisError as error:
            if not any(word in str(error) for word in _PASSING_STATES):
                raise
            if not told:
                log.warning("%s: Redis refuses (%s), waiting", what, error)
                told = True
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, 1.0)
