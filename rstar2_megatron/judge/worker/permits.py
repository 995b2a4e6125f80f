"""How many calls may use CPU at the same time: a few more than there are cores.

With more of them, calls would share cores and caches, and each would take longer, with nothing gained. A call that
sleeps, or that has used its slice of CPU, is demoted: it keeps its slot and no longer counts here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Permits:
    """Semaphore for calls that use CPU; a permit is released early when the call sleeps or runs long."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self.on_free: Callable[[], None] = lambda: None
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self) -> Permit:
        """One of the free permits, without waiting."""
        assert self.free > 0, "no permit is free"
        self.free -= 1
        return Permit(self)

    async def acquire(self) -> Permit:
        """Wait for a permit. Waiting callers are served before any caller of `take`."""
        if self.free == 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._put_back()
                raise
            return Permit(self)
        return self.take()

    def _put_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1
        self.on_free()


class Permit:
    """The right of one call to use CPU."""

    def __init__(self, permits: Permits) -> None:
        self._permits: Permits | None = permits

    def release(self) -> None:
        """Safe to call twice: when the call is demoted, and when it ends."""
        permits, self._permits = self._permits, None
        if permits is not None:
            permits._put_back()
