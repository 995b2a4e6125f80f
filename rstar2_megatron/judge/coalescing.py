"""Reply coalescing: how long a server waits before it reads the replies of a queue together. Pure."""

from __future__ import annotations

import math

_SHARE = 1 / 4  # of the waiting requests whose replies are read together
_FEWEST = 16  # waiting requests: with fewer, clients and workers would be idle during the pause
_MOST_S = 0.025
_MEMORY_S = 1.0  # time constant of the rate


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


class ReplyCoalescing:
    """The pause before the next read, from the number of waiting requests and the recent rate of replies.

    Replies that are read one by one also wake the server, the clients and the worker one by one: at 32 clients that is a
    third of the cost of HTTP and Redis. During the pause about a quarter of the waiting requests get their reply, so it
    adds at most a quarter to their waiting time, and never more than 25 ms. With fewer than 16 of them there is no pause.
    """

    def __init__(self, now: float) -> None:
        """`now` and all times are monotonic seconds."""
        self._rate = Rate(now)

    def read(self, count: int, now: float) -> None:
        """Record that `count` replies were read."""
        self._rate.add(count, now)

    def pause_s(self, waiting: int) -> float:
        """Seconds to wait before the next read, with `waiting` requests unanswered."""
        if waiting < _FEWEST or self._rate.per_s <= 0:
            return 0.0
        return min(_MOST_S, _SHARE * waiting / self._rate.per_s)
