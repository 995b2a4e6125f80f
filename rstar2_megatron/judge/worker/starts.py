"""How many short calls may run at once: a little more than there are cores.

More would share cores and caches and each take longer, with nothing gained. A call that sleeps, or has used its
slice of CPU, no longer counts: sleepers and endless loops hold their slots, not the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Starts:
    """Leaves to start a call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self.on_free: Callable[[], None] = lambda: None
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self) -> Start:
        """One of the free ones."""
        assert self.free > 0, "no start is free"
        self.free -= 1
        return Start(self)

    async def acquire(self) -> Start:
        """Wait for one. Those who wait come before all who `take`."""
        if self.free == 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._return()
                raise
            return Start(self)
        return self.take()

    def _return(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1
        self.on_free()


class Start:
    """One leave. May be given back more than once: when its call steps back, and when it ends."""

    def __init__(self, starts: Starts) -> None:
        self._starts: Starts | None = starts

    def give_back(self) -> None:
        starts, self._starts = self._starts, None
        if starts is not None:
            starts._return()
