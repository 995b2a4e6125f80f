"""What travels together costs less each: the rate of answers, and how long a server lets them gather. Pure."""

from __future__ import annotations

import math

_SHARE = 1 / 4  # of all that wait, as many answers
_FEWEST = 16  # that wait: with fewer, clients and worker would be idle meanwhile
_MOST_S = 0.025
_MEMORY_S = 1.0  # answers so long ago count for a third


class Rate:
    """Answers a second, of late."""

    def __init__(self, now: float) -> None:
        """`now` and all times are monotonic seconds."""
        self._last = now
        self.per_s = 0.0

    def add(self, count: int, now: float) -> None:
        """`count` answers came."""
        passed, self._last = now - self._last, now
        if passed > 0:
            kept = math.exp(-passed / _MEMORY_S)
            self.per_s = kept * self.per_s + (1 - kept) * count / passed


class ReplyCoalescing:
    """The pause before the next read, from how many wait and how fast they were answered.

    Read one by one, answers wake the server, each client and the worker one by one too: at 32 clients that is a third
    of what HTTP and Redis cost. The pause lasts until about a quarter of those who wait have their answer, so it adds
    a quarter at most to what they wait anyway, and never more than 25 ms; where fewer than 16 wait there is none.
    """

    def __init__(self, now: float) -> None:
        """`now` and all times are monotonic seconds."""
        self._rate = Rate(now)

    def read(self, count: int, now: float) -> None:
        """`count` answers came."""
        self._rate.add(count, now)

    def pause_s(self, waiting: int) -> float:
        """Seconds to let pass when `waiting` requests have no answer yet."""
        if waiting < _FEWEST or self._rate.per_s <= 0:
            return 0.0
        return min(_MOST_S, _SHARE * waiting / self._rate.per_s)
