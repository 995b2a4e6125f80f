"""How much longer a trajectory of a given length will get, judged by those that have ended."""

from __future__ import annotations

import bisect
from collections import deque


class RemainingLength:
    """Quantiles of (final length - length so far) among ended trajectories that were at least as long.

    Keeps the last `window` lengths, so that it follows a policy whose answers grow during training. Trajectories
    end short first, so early in a phase the estimate is low; feedback from evictions corrects it (`kv_budget`).
    """

    def __init__(self, window: int = 4096, min_samples: int = 16) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._window = window
        self._min_samples = min_samples

    def add(self, length: int) -> None:
        """A trajectory ended with `length` response tokens."""
        self._recent.append(length)
        bisect.insort(self._sorted, length)
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]

    def quantile(self, so_far: int, q: float) -> int | None:
        """Remaining tokens that a share `q` of comparable trajectories stayed within.

        None when too few ended trajectories were as long as `so_far`: then nothing is known.
        """
        first = bisect.bisect_left(self._sorted, so_far)
        count = len(self._sorted) - first
        if count < self._min_samples:
            return None
        index = first + min(count - 1, int(q * count))
        return self._sorted[index] - so_far
