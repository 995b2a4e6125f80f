"""Estimates response lengths from ended and from running trajectories.

Short trajectories end first. An estimate from ended trajectories alone is therefore far too low early in a phase, when the
cache fills. The product-limit estimator (Kaplan and Meier 1958) also counts running trajectories, as survivors up to their
current length.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MEMORY = 4096  # trajectories after which an ended one weighs 1/e: lengths drift during training
_SURVIVORS = 16  # pseudo-survivors of every bin: a length that few have reached counts as long
_PRIOR = 2.0  # pseudo-trajectories of mean duration in every group


class LengthSurvival:
    """Survival of response lengths over `num_bins` bins up to `max_tokens`.

    `log_survival` [num_bins + 1] holds ln P(length > i * bin_tokens). Lengths without data count as survived, so an
    estimate without any data is the maximum.
    """

    def __init__(self, max_tokens: int, num_bins: int = 64) -> None:
        self.bin_tokens = max(1, -(-max_tokens // num_bins))
        self.num_bins = num_bins
        self._ended: Array = np.zeros(num_bins)
        self.log_survival: Array = np.zeros(num_bins + 1)

    def bin_of(self, tokens: int) -> int:
        return min(tokens // self.bin_tokens, self.num_bins - 1)

    def add(self, tokens: int) -> None:
        """Add a trajectory that ended with `tokens` response tokens. `refresh` updates `log_survival`."""
        self._ended *= 1 - 1 / _MEMORY
        self._ended[self.bin_of(tokens)] += 1

    def expected_left(self, tokens: int) -> float:
        """Expected tokens that a trajectory of `tokens` response tokens still gets, by the last `refresh`."""
        first = self.bin_of(tokens)
        survival = np.exp(self.log_survival[first:] - self.log_survival[first])
        means = (survival[:-1] + survival[1:]) / 2 * self.bin_tokens
        part = max(0.0, first + 1 - tokens / self.bin_tokens)  # of its bin that lies ahead
        return float(part * means[0] + means[1:].sum())

    def refresh(self, running: Iterable[int]) -> None:
        """Recompute `log_survival` from ended trajectories and the lengths of running ones."""
        reached = np.zeros(self.num_bins)  # running trajectories by current bin
        for tokens in running:
            reached[self.bin_of(tokens)] += 1
        past = np.cumsum(reached[::-1])[::-1] - reached  # running trajectories beyond each bin
        at_risk = np.cumsum(self._ended[::-1])[::-1] + past
        hazard = self._ended / (at_risk + _SURVIVORS)
        self.log_survival[1:] = np.cumsum(np.log1p(-hazard))


class GroupDurations:
    """Expected duration of a group's trajectories, from its ended and running ones. Used to start long groups first.

    The estimate is (seconds of ended and running trajectories) / (number ended), drawn towards the mean of all groups by
    two pseudo-trajectories.
    """

    def __init__(self) -> None:
        self._ended: dict[int, tuple[int, float]] = {}  # how many, and the sum of their seconds
        self._total = 0.0
        self._count = 0

    def add(self, group: int, duration: float) -> None:
        """Add a trajectory of `group` that ended after `duration` seconds."""
        count, seconds = self._ended.get(group, (0, 0.0))
        self._ended[group] = count + 1, seconds + duration
        self._total += duration
        self._count += 1

    def forget(self, group: int) -> None:
        """Keep the group's share of the mean only."""
        self._ended.pop(group, None)

    @property
    def known(self) -> bool:
        return self._count > 0

    def expected(self, group: int, running: float = 0.0) -> float:
        """Expected duration in seconds. `running` sums the seconds of the group's unfinished trajectories."""
        mean = self._total / self._count if self._count else 1.0
        count, seconds = self._ended.get(group, (0, 0.0))
        return (_PRIOR * mean + seconds + running) / (_PRIOR + count)
