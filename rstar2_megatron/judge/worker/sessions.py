"""The live interpreters of one worker: the slot of each session, the order of its calls, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from rstar2_megatron.judge.worker.slots import Slot, SlotPool


class SessionGone(Exception):
    """The call needs the interpreter of a session that is not open at this worker."""


_KEPT_ANSWERS = 4


@dataclass
class _Session:
    slot: Slot
    used_at: float
    # Job key and answer of the last calls: a restarted Redis may send a finished job again.
    answers: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_ANSWERS))


@dataclass
class _Turns:
    """Runs the calls of one session one after another, in the order of their arrival."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class Sessions:
    """Opens, finds and ends the sessions of a worker."""

    def __init__(self, pool: SlotPool, time_to_live_s: float) -> None:
        self.pool = pool
        self.time_to_live_s = time_to_live_s
        self._open: dict[str, _Session] = {}
        self._turns: dict[str, _Turns] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    @property
    def names(self) -> list[str]:
        """Open sessions, and sessions that a call is about to open."""
        return list({**self._open, **self._turns})

    def is_busy(self, name: str) -> bool:
        """Whether a call of this session is running or waiting for its turn."""
        return name in self._turns

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait until the earlier calls of this session have ended."""
        turns = self._turns.setdefault(name, _Turns())
        turns.waiting += 1
        try:
            async with turns.lock:
                yield
        finally:
            turns.waiting -= 1
            if not turns.waiting:
                self._turns.pop(name, None)

    async def run(
        self,
        name: str,
        must_exist: bool,
        key: str,
        job: bytes,
        deadline_s: float,
        on_demotion: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Run a cell (JSON) in its turn. Opens the session first when it is not open, unless it `must_exist`.

        Returns the result (JSON). A job `key` that has run here before is not run again: its kept result is returned.
        Raises SessionGone, SlotDied, TimeoutError; after the last two the session has ended.
        """
        session = self._open.get(name)
        if session is None:
            if must_exist or not self.pool.session_room:
                raise SessionGone(name)
            session = _Session(await self.pool.open_session_slot(), time.monotonic())
            self._open[name] = session
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
        if answer.endswith(b'"session": "lost"}'):
            self.end(name)
        return answer

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
