"""The live interpreters of one worker: the slot of each session, the order of its calls, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from rstar2_megatron.judge.worker.slots import Slot, SlotPool


class SessionGone(Exception):
    """The call needs the interpreter of a session that is not open at this worker; the text says why."""


_KEPT_ANSWERS = 4


class Call(NamedTuple):
    """A leased job as it is handed to a slot."""

    key: str
    request: dict[str, Any]
    body: bytes  # the request as JSON
    deadline_s: float


@dataclass
class _Session:
    slot: Slot
    used_at: float
    client: str
    # Job key and answer of the last calls: a restarted Redis may send a finished job again.
    answers: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_ANSWERS))


class Sessions:
    """Opens, finds and ends the sessions of a worker."""

    evictable_after_s = 20.0  # a session that was unused for so long makes room for a client with fewer

    def __init__(self, pool: SlotPool, time_to_live_s: float) -> None:
        self.pool = pool
        self.time_to_live_s = time_to_live_s
        self._open: dict[str, _Session] = {}
        self._locks: dict[str, asyncio.Lock] = {}  # of sessions with calls, which get them in the order of their arrival
        self._calls: Counter[str] = Counter()  # calls of a session that run or wait for their turn
        self._waited: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    @property
    def names(self) -> list[str]:
        """Open sessions, and sessions that a call is about to open."""
        return list({**self._open, **self._locks})

    def is_busy(self, name: str) -> bool:
        """Whether a call of this session is running or waiting for its turn."""
        return name in self._locks

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait until the earlier calls of this session have ended."""
        self._calls[name] += 1
        try:
            async with self._locks.setdefault(name, asyncio.Lock()):
                yield
        finally:
            self._calls[name] -= 1
            if not self._calls[name]:
                del self._calls[name], self._locks[name]

    async def run(self, call: Call, on_demotion: Callable[[], None]) -> bytes:
        """Run a cell in its turn. Returns the result (JSON).

        A session that is not open is opened, unless the request has session_must_exist. A job that has run before is not run
        again: its kept result is returned. Raises SessionGone, SlotDied, TimeoutError; after the last two the session has
        ended.
        """
        key, request, job, deadline_s = call
        name = request["session"]
        session = self._open.get(name) or await self._open_new(call)
        for done, answer in session.answers:
            if done == key:
                return answer
        try:
            answer = await session.slot.run(job, deadline_s, on_demotion)
        except BaseException:
            self.end(name)
            raise
        session.used_at = time.monotonic()
        session.answers.append((key, answer))
        if orjson.loads(answer)["session"] == "lost":
            self.end(name)
        return answer

    async def _open_new(self, call: Call) -> _Session:
        name = call.request["session"]
        if call.request["session_must_exist"] or not self.pool.session_room:
            raise SessionGone(f"session {name} is not open here: it has expired, or its worker ended")
        session = _Session(await self.pool.open_session_slot(), time.monotonic(), call.key.partition("/")[0])
        self._open[name] = session
        return session

    def make_room(self, waiting: dict[str, int]) -> list[str]:
        """When no more sessions fit, end idle ones for clients that wait to open some. Returns the ended ones' names.

        waiting: by client, how many of its calls wait to open one; only those that waited at the last look as well count.

        The least recently used goes first, and only one of an owner with at least two more than the waiting one's, or of
        another client of the same owner with at least two more. A client is OWNER~NAME.
        """
        oldest = time.monotonic() - self.evictable_after_s
        before, self._waited = self._waited, waiting
        wanted = Counter({client: count for client, count in waiting.items() if client in before})
        counts = Counter(session.client for session in self._open.values())
        owners = Counter(session.client.partition("~")[0] for session in self._open.values())
        evicted = []
        for name, session in sorted(self._open.items(), key=lambda item: item[1].used_at):
            owner = session.client.partition("~")[0]
            for client in wanted:
                other = client.partition("~")[0]
                more = counts[session.client] - counts[client] if owner == other else owners[owner] - owners[other]
                if more >= 2 and wanted[client] > 0 and session.used_at < oldest and not self.is_busy(name):
                    self.end(name)
                    evicted.append(name)
                    wanted.subtract((client,))
                    counts.subtract((session.client,))
                    owners.subtract((owner,))
                    counts.update((client,))
                    owners.update((other,))
                    break
        return evicted

    def end(self, name: str) -> bool:
        """End a session's processes. False when the session is not open."""
        session = self._open.pop(name, None)
        if session is None:
            return False
        self.pool.close_session_slot(session.slot)
        return True

    def end_idle(self) -> list[str]:
        """End sessions that were unused for `time_to_live_s`. Returns their names."""
        oldest = time.monotonic() - self.time_to_live_s
        idle = [n for n, s in self._open.items() if s.used_at < oldest and not self.is_busy(n)]
        for name in idle:
            self.end(name)
        return idle
