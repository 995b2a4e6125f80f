"""When calls begin, when jobs are leased and when replies are read. Pure.

Permits bound the calls that use CPU at the same time to a few more than there are cores. With more of them, calls would
share cores and caches, and each would take longer, with nothing gained.

A worker that leases a job only when a slot is free for it needs a round trip to Redis for each call. With a few jobs
prefetched the next call begins at once, and one round trip serves several calls. No more jobs are prefetched than
begin within `ROUND_TRIP_S`, so that no job waits here for long calls while another worker is idle.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rstar2_megatron.judge.queue import LeasedJob

# Time between two exchanges with Redis while prefetched jobs wait: the longest delay of an answer.
ROUND_TRIP_S = 0.02
_SHARE = 1 / 4  # of the waiting requests whose replies are read together
_FEWEST = 16  # waiting requests: with fewer, clients and workers would be idle during the pause
_MOST_S = 0.025
_MEMORY_S = 1.0  # time constant of the rate


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


class Rate:
    """Events per second, as an exponential moving average."""

    def __init__(self, now: float) -> None:
        """`now` and all times are monotonic seconds."""
        self._last = now
        self.per_s = 0.0

    def add(self, count: int, now: float) -> None:
        """Record `count` events."""
        passed, self._last = now - self._last, now
        if passed > 0:
            kept = math.exp(-passed / _MEMORY_S)
            self.per_s = kept * self.per_s + (1 - kept) * count / passed


def reply_pause_s(waiting: int, rate: Rate) -> float:
    """Seconds to wait before the next read of replies, which come at `rate`, with `waiting` requests unanswered.

    Replies that are read one by one also wake the server, the clients and the worker one by one: at 32 clients that is a
    third of the cost of HTTP and Redis. During the pause about a quarter of the waiting requests get their reply, so it
    adds at most a quarter to their waiting time, and never more than 25 ms. With fewer than 16 of them there is no pause.
    """
    if waiting < _FEWEST or rate.per_s <= 0:
        return 0.0
    return min(_MOST_S, _SHARE * waiting / rate.per_s)


class PrefetchedJobs(dict[str, "LeasedJob"]):
    """Jobs that are leased and not begun, by key, in the order of their arrival."""

    def __init__(self, now: float) -> None:
        """`now` and all times are monotonic seconds."""
        super().__init__()
        self._rate = Rate(now)

    def answered(self, count: int, now: float) -> None:
        """Record that `count` calls have ended."""
        self._rate.add(count, now)

    def num_to_lease(self, slots: int, permits: int) -> int:
        """How many more jobs to lease, with this many free slots and permits: those that can begin, and a few more.

        Never more than free slots: the calls in occupied slots may sleep for a long time.
        """
        now = min(slots, permits)
        ahead = min(int(self._rate.per_s * ROUND_TRIP_S), slots - now)
        return max(0, now + ahead - len(self))

    def take_first(self) -> LeasedJob:
        """Remove and return the job that was leased first. Raises StopIteration when there is none."""
        return self.pop(next(iter(self)))
