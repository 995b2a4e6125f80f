"""Which trajectories an engine may run at once, so that its KV cache is full but not exceeded.

An engine that admits too many trajectories evicts running requests and computes their tokens again. An engine that admits
too few is idle. The paper's scheduler (arXiv 2508.20722, section 3.2) admits a trajectory only if it fits at maximum length.
It was not released. `AdaptiveBudget` admits by expected length, and parks the shortest trajectories when it was wrong.

Pure: no clock, no engine. The same object runs in production and in the simulator (`benchmarks/rollout/scheduler.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from rstar2_megatron.rollout.scheduling.kv_budget import CountBudget, KVBudget, KVReservation
from rstar2_megatron.rollout.scheduling.length_estimate import Array, LengthSurvival

_LONG_WAIT = 3  # engine reports after which a tool wait counts as long
_CROWDED = 0.8  # share of the capacity above which long tool waits are preempted
# Standard deviations that are kept free: at the start, at most, more after evictions, less after a report without any.
_FIRST_Z, _MOST_Z, _RAISE_BY, _LOWER_BY = 0.5, 1.5, 0.1, 0.01
_LEARN_EVERY = 16  # lengths


class AdaptiveBudget(KVBudget):
    """Admits trajectories that will probably fit: `kv_adaptive`.

    All running trajectories grow by one token a step. The survival of lengths (`length_estimate`) therefore gives the expected
    use of the cache at every later time, and its variance. A trajectory is admitted when the peak of the expectation plus
    `z` standard deviations stays within the capacity. Reserving every maximum would leave most of the cache empty, because
    few trajectories reach it, and not at the same time.

    Lengths within a group are correlated, which the variance ignores. So evictions raise `z`, and reports without
    evictions lower it slowly.
    """

    def __init__(self, capacity_tokens: int, max_requests: int) -> None:
        super().__init__(capacity_tokens, max_requests)
        self.z = _FIRST_Z
        self._learnt = 0
        self._waits: Counter[Hashable] = Counter()  # reports in a row during one tool wait
        self.lengths: LengthSurvival | None = None  # made at the first admission, which gives the longest response
        # A curve [2, bins + 1] is the expectation and the variance of future tokens (`_curves_of`).
        self._curves: dict[Hashable, Array] = {}
        self._known: dict[tuple[int, int], Array] = {}  # by current and longest response
        self._total: Array = np.zeros((2, 1))  # the sum of `_curves`

    @property
    def reserved_tokens(self) -> int:
        """Peak of the projected use."""
        return self._prompt_tokens + int(self._peak(self._total))

    def observe(
        self, evictions: int, lengths: Mapping[Any, int], engine_tokens: int = 0, at_tools: Collection[Hashable] = ()
    ) -> None:
        super().observe(evictions, lengths, engine_tokens)
        self._waits = Counter({key: self._waits[key] + 1 for key in at_tools if key in self._reservations})
        too_many = evictions or self.used_tokens > self.capacity_tokens
        step = _RAISE_BY if too_many else -_LOWER_BY
        self.z = min(_MOST_Z, max(0.0, self.z + step))
        self._project()

    def preempt(self) -> list[Hashable]:
        """Trajectories to park: first those with long tool waits in a crowded cache, then those with the fewest tokens.

        A trajectory that waits for a tool does not decode, and the engine drops its tokens when it needs the space. So its
        reservation is free at once. Then the trajectories with the fewest response tokens are parked, until the others fit.
        Until the next report they grow into what `z` keeps free, and into the room of those that end.

        The engine itself would evict only when its cache is full, and would first drop the prefixes of trajectories in a
        tool call, long ones included. The trajectory with the most tokens always stays, so that one always ends.
        """
        away = self._free_waiting()
        staying = {key: reservation for key, reservation in self._reservations.items() if key not in self._leaving}
        users = Counter(reservation.group for reservation in staying.values())
        prompts = {reservation.group: reservation.prompt_tokens for reservation in staying.values()}
        need = self._uncounted + sum(prompts.values())
        need += sum(reservation.response_tokens for reservation in staying.values())
        chosen: list[Hashable] = []
        for key in sorted(staying, key=lambda k: staying[k].response_tokens)[:-1]:
            if need <= self.capacity_tokens:
                break
            reservation = staying[key]
            users[reservation.group] -= 1
            need -= reservation.response_tokens + (0 if users[reservation.group] else reservation.prompt_tokens)
            chosen.append(key)
        self._leaving.update(chosen)
        if chosen:
            self.z = min(_MOST_Z, self.z + _RAISE_BY)
        return away + chosen

    def _free_waiting(self) -> list[Hashable]:
        if self.reserved_tokens <= _CROWDED * self.capacity_tokens:
            return []
        away = [key for key, n in self._waits.items() if n >= _LONG_WAIT and key not in self._leaving]
        for key in away:
            self._remove(key)
        self._leaving.update(away)
        self._away.update(away)
        return away

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        curve = self._curve(reservation)  # which may make `_total` anew
        return self._prompt_tokens + shared + self._peak(self._total + curve) <= self.capacity_tokens

    def _peak(self, curve: Array) -> float:
        expected, variance = curve
        # rounding can leave a variance slightly below zero
        return float(np.max(expected + self.z * np.sqrt(np.maximum(variance, 0.0))))

    def _reserve(self, key: Hashable, reservation: KVReservation) -> None:
        self._curves[key] = curve = self._curve(reservation)
        # that of a first one may be in `_total` already, by the estimate that it made
        self._total = curve if len(self._curves) == 1 else self._total + curve

    def _length_changed(self, key: Hashable, reservation: KVReservation) -> None:
        self._unreserve(key, reservation)
        self._reserve(key, reservation)

    def _unreserve(self, key: Hashable, reservation: KVReservation) -> None:
        curve = self._curves.pop(key)
        # without rounding when nothing runs
        self._total = self._total - curve if self._curves else np.zeros_like(self._total)

    def _learn_length(self, reservation: KVReservation) -> None:
        if self.lengths is None:
            return
        self.lengths.add(reservation.response_tokens)
        self._learnt += 1
        if self._learnt % _LEARN_EVERY == 0:
            self._project()

    def _project(self) -> None:
        """Refresh the length estimate and the curve of every running trajectory."""
        if self.lengths is None:
            return
        self._known.clear()
        reservations = list(self._reservations.values())
        self.lengths.refresh([reservation.response_tokens for reservation in reservations])
        curves = self._curves_of(reservations)
        self._curves = {key: curves[:, i] for i, key in enumerate(self._reservations)}
        self._total = curves.sum(axis=1)

    def _curve(self, reservation: KVReservation) -> Array:
        longest = reservation.max_tokens - reservation.prompt_tokens
        if self.lengths is None or self.lengths.num_bins * self.lengths.bin_tokens < longest:
            self.lengths = LengthSurvival(1 << (longest - 1).bit_length())
            self._project()
        like = reservation.response_tokens, longest
        if like not in self._known:
            self._known[like] = self._curves_of([reservation])[:, 0]
        return self._known[like]

    def _curves_of(self, reservations: Sequence[KVReservation]) -> Array:
        """Expected response tokens and their variance [2, reservations, bins + 1], after 0, 1, 2, ... bins of steps."""
        assert self.lengths is not None
        bins, width = self.lengths.num_bins, self.lengths.bin_tokens
        now = np.array([reservation.response_tokens for reservation in reservations], dtype=np.int64)
        longest = np.array([reservation.max_tokens - reservation.prompt_tokens for reservation in reservations], dtype=np.int64)
        first = np.minimum(now // width, bins - 1)[:, None]
        ahead = np.arange(bins + 1)[None, :]
        log_survival = self.lengths.log_survival
        at = log_survival[np.minimum(first + ahead, bins)] - log_survival[first]
        survives = np.where(first + ahead <= bins, np.exp(at), 0.0)
        tokens = np.minimum(now[:, None] + ahead * width, longest[:, None]).astype(np.float64)
        return np.stack([survives * tokens, survives * (1 - survives) * tokens * tokens])


POLICIES: dict[str, type[KVBudget]] = {
    "static": CountBudget,
    "least_requests": CountBudget,
    "kv_reserve": KVBudget,
    "kv_adaptive": AdaptiveBudget,
}


def make_budget(policy: str, capacity_tokens: int, max_requests: int) -> KVBudget:
    """The budget named by `rollout.scheduler`."""
    return POLICIES[policy](capacity_tokens, max_requests)
