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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from rstar2_megatron.judge.queue import LeasedJob

T = TypeVar("T")
# Time between two exchanges with Redis while prefetched jobs wait: the longest delay of an answer.
ROUND_TRIP_S = 0.02
_SHARE = 1 / 4  # of the waiting requests whose replies are read together
_FEWEST = 16  # waiting requests: with fewer, clients and workers would be idle during the pause
_MOST_S = 0.025
_MEMORY_S = 1.0  # time constant of the rate


class FreeList(Generic[T]):
    """Free slots or permits. A call that waits for one is served before calls that have not begun."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = deque(items)
        self._waiting: deque[asyncio.Future[T]] = deque()
        self.on_free: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._items)

    def take(self) -> T:
        """One that is free, the one that has been free longest. Raises IndexError when there is none."""
        return self._items.popleft()

    async def get(self) -> T:
        """Wait for one."""
        if self._items:
            return self.take()
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.put(turn.result())
            raise

    def put(self, item: T) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(item)
                return
        self._items.append(item)
        self.on_free()


class Permit:
    """The right of one call to use CPU, which ends early when the call sleeps or runs long."""

    def __init__(self, free: FreeList[None]) -> None:
        """For one that was taken from `free`."""
        self._free: FreeList[None] | None = free

    def release(self) -> None:
        """Safe to call twice: when the call is demoted, and when it ends."""
        free, self._free = self._free, None
        if free is not None:
            free.put(None)


class Rate:
    """Events per second, as an exponential moving average. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._last = now
        self.per_s = 0.0

    def add(self, count: int, now: float) -> None:
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
    """Jobs that are leased and not begun, by key, in the order of their arrival. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
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
