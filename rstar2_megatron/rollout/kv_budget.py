"""Which trajectories an engine may run at once, so that its KV cache is full and never overfull.

An engine that admits more than fits evicts running requests and computes their tokens again; one that admits too
few sits idle. The paper's scheduler (arXiv 2508.20722, section 3.2) admits what surely fits at maximum length; it
was not released, public code has only its commented-out trace. `AdaptiveBudget` admits what will fit.

Pure: tokens and keys come in as arguments, no clock, no engine. The same object runs in production and in the
simulator (`benchmarks/scheduler.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rstar2_megatron.rollout.length_estimate import Array, LengthSurvival


@dataclass(slots=True)
class Lease:
    """One admitted trajectory; lengths in tokens, prompt included."""

    group: Hashable
    prompt_tokens: int
    max_tokens: int  # prompt and longest possible response
    length: int  # now

    @property
    def response_tokens(self) -> int:
        return self.length - self.prompt_tokens


class KVBudget:
    """Admission by reservation. Base class: the paper's rule (`kv_reserve`), the maximum of each trajectory.

    A group's prompt is counted once, because its trajectories share it in the engine's prefix cache.
    """

    def __init__(self, capacity_tokens: int, max_requests: int) -> None:
        if capacity_tokens < 1 or max_requests < 1:
            raise ValueError(
                f"a KV budget needs room: capacity_tokens={capacity_tokens}, max_requests={max_requests}"
            )
        self.capacity_tokens = capacity_tokens
        self.max_requests = max_requests
        self._leases: dict[Hashable, Lease] = {}
        self._prompts: Counter[Hashable] = Counter()
        self._prompt_tokens = 0  # of the groups that run
        self._reserved = 0  # response tokens

    @property
    def running(self) -> int:
        return len(self._leases)

    @property
    def reserved_tokens(self) -> int:
        """Tokens spoken for: never more than the capacity, but for a lone trajectory."""
        return self._prompt_tokens + self._reserved

    @property
    def used_tokens(self) -> int:
        """Tokens that the admitted trajectories have now, shared prompts once."""
        return self._prompt_tokens + sum(lease.response_tokens for lease in self._leases.values())

    def has_room(self) -> bool:
        """Whether asking for more work makes sense at all."""
        return self.running < self.max_requests and self.reserved_tokens < self.capacity_tokens

    def room(self) -> int:
        """About how many more trajectories would fit, one at least: how much work to ask for."""
        slots = self.max_requests - self.running
        if self._leases:
            each = max(1, self.reserved_tokens // self.running)
            slots = min(slots, (self.capacity_tokens - self.reserved_tokens) // each)
        return max(1, slots)

    def try_admit(
        self, key: Hashable, group: Hashable, prompt_tokens: int, max_tokens: int, length: int | None = None
    ) -> bool:
        """Reserve for one trajectory if it fits; `max_tokens` is prompt and longest response.

        `length` is what a trajectory that goes on from an earlier step has already. An empty engine takes any
        trajectory that fits it alone. Raises ValueError for one that never can, and for a key already admitted.
        """
        if key in self._leases:
            raise ValueError(f"trajectory {key!r} is already admitted")
        if max_tokens > self.capacity_tokens:
            raise ValueError(
                f"a trajectory of {max_tokens} tokens never fits a KV cache of {self.capacity_tokens}; raise "
                f"rollout.max_total_tokens or rollout.gpu_memory_utilization, or lower runner.seq_length"
            )
        if self.running >= self.max_requests:
            return False
        lease = Lease(group, prompt_tokens, max_tokens, prompt_tokens if length is None else length)
        shared = 0 if self._prompts[group] else prompt_tokens
        if self._leases and not self._fits(lease, shared):
            return False
        self._leases[key] = lease
        self._prompts[group] += 1
        self._prompt_tokens += shared
        self._take(key, lease)
        return True

    def settle(self, key: Hashable, length: int) -> None:
        """The trajectory is `length` tokens long now; its reservation follows."""
        self._leases[key].length = length
        self._follow(key, self._leases[key])

    def release(self, key: Hashable, *, finished: bool = True) -> None:
        """The trajectory ended (`finished`) or was given up; its tokens are free."""
        lease = self._leases.pop(key)
        self._prompts[lease.group] -= 1
        if not self._prompts[lease.group]:
            del self._prompts[lease.group]
            self._prompt_tokens -= lease.prompt_tokens
        self._give_back(key, lease)
        if finished:
            self._learn(lease)

    def observe(self, evictions: int, lengths: Mapping[Any, int]) -> None:
        """The engine's report, about once a second.

        `evictions`: running requests evicted since the last report (0 tells that all is well); `lengths`: tokens of
        admitted trajectories now, which grow inside a turn too.
        """
        for key, length in lengths.items():
            self._leases[key].length = length

    # what a policy decides

    def _fits(self, lease: Lease, shared: int) -> bool:
        need = lease.max_tokens - lease.prompt_tokens + shared
        return self.reserved_tokens + need <= self.capacity_tokens

    def _take(self, key: Hashable, lease: Lease) -> None:
        self._reserved += lease.max_tokens - lease.prompt_tokens

    def _follow(self, key: Hashable, lease: Lease) -> None:
        pass

    def _give_back(self, key: Hashable, lease: Lease) -> None:
        self._reserved -= lease.max_tokens - lease.prompt_tokens

    def _learn(self, lease: Lease) -> None:
        pass


class CountBudget(KVBudget):
    """A number of trajectories, whatever they need (`static`, `least_requests`): what public code does."""

    def has_room(self) -> bool:
        return self.running < self.max_requests

    def room(self) -> int:
        return max(1, self.max_requests - self.running)

    def _fits(self, lease: Lease, shared: int) -> bool:
        return True


_FEW_LENGTHS = 512


class AdaptiveBudget(KVBudget):
    """Admits while the cache will, in all probability, hold what is admitted: `kv_adaptive`.

    All running trajectories grow one token a step, so with the survival of lengths (`length_estimate`) the use of
    the cache at every later time is known: expected tokens, and their variance. A trajectory is admitted when the
    highest point of that curve, plus `z` standard deviations, stays inside the capacity. Reserving each one's
    maximum leaves most of the cache empty, because few get there and not at the same time. Evictions raise `z`,
    quiet lowers it slowly: lengths inside a group go together, which the variance does not know. While few lengths
    are known, what runs grows by a tenth a report, so that a first wrong guess does not fill the engine.
    """

    def __init__(
        self,
        capacity_tokens: int,
        max_requests: int,
        *,
        z: float = 0.5,
        z_range: tuple[float, float] = (0.0, 1.5),
        raise_by: float = 0.1,
        lower_by: float = 0.01,
        learn_every: int = 16,
    ) -> None:
        super().__init__(capacity_tokens, max_requests)
        self.z = z
        self._z_range = z_range
        self._raise_by = raise_by
        self._lower_by = lower_by
        self._learn_every = learn_every
        self._learnt = 0
        self._ceiling = float("inf")  # most that may run until the next report
        self.lengths: LengthSurvival | None = (
            None  # made at the first admission, which knows the longest response
        )
        self._curves: dict[Hashable, tuple[Array, Array]] = {}
        self._expected = self._variance = np.zeros(1)

    @property
    def reserved_tokens(self) -> int:
        """The highest point of the projected use."""
        return self._prompt_tokens + int(self._peak(self._expected, self._variance))

    def observe(self, evictions: int, lengths: Mapping[Any, int]) -> None:
        super().observe(evictions, lengths)
        too_many = evictions or self.used_tokens > self.capacity_tokens
        step = self._raise_by if too_many else -self._lower_by
        young = 0 < self._learnt < _FEW_LENGTHS and self.running
        self._ceiling = self.running * 1.1 + 4 if young else float("inf")
        self.z = min(self._z_range[1], max(self._z_range[0], self.z + step))
        self._project()

    def _fits(self, lease: Lease, shared: int) -> bool:
        if self.running >= self._ceiling:
            return False
        expected, variance = self._curve(lease)
        peak = self._peak(self._expected + expected, self._variance + variance)
        return self._prompt_tokens + shared + peak <= self.capacity_tokens

    def _peak(self, expected: Array, variance: Array) -> float:
        # differences of large sums may leave a little less than nothing
        return float(np.max(expected + self.z * np.sqrt(np.maximum(variance, 0.0))))

    def _take(self, key: Hashable, lease: Lease) -> None:
        self._curves[key] = expected, variance = self._curve(lease)
        if len(self._curves) == 1:
            self._expected, self._variance = expected.copy(), variance.copy()
        else:
            self._expected = self._expected + expected
            self._variance = self._variance + variance

    def _follow(self, key: Hashable, lease: Lease) -> None:
        self._give_back(key, lease)
        self._take(key, lease)

    def _give_back(self, key: Hashable, lease: Lease) -> None:
        expected, variance = self._curves.pop(key)
        if self._curves:
            self._expected = self._expected - expected
            self._variance = self._variance - variance
        else:
            self._expected = self._variance = np.zeros_like(self._expected)

    def _learn(self, lease: Lease) -> None:
        if self.lengths is None:
            return
        self.lengths.add(lease.response_tokens)
        self._learnt += 1
        if self._learnt % self._learn_every == 0:
            self._project()

    def _project(self) -> None:
        """Refresh what is known of lengths, and every running trajectory's curve with it."""
        if self.lengths is None:
            return
        leases = list(self._leases.values())
        self.lengths.refresh([lease.response_tokens for lease in leases])
        expected, variance = self._curves_of(leases)
        self._curves = {key: (expected[i], variance[i]) for i, key in enumerate(self._leases)}
        self._expected, self._variance = expected.sum(axis=0), variance.sum(axis=0)

    def _curve(self, lease: Lease) -> tuple[Array, Array]:
        longest = lease.max_tokens - lease.prompt_tokens
        if self.lengths is None or self.lengths.num_bins * self.lengths.bin_tokens < longest:
            self.lengths = LengthSurvival(1 << (longest - 1).bit_length())
            self._project()
        expected, variance = self._curves_of([lease])
        return expected[0], variance[0]

    def _curves_of(self, leases: Sequence[Lease]) -> tuple[Array, Array]:
        """Expected response tokens and their variance [leases, bins + 1] after 0, 1, 2, ... bins of further steps."""
        assert self.lengths is not None
        bins, width = self.lengths.num_bins, self.lengths.bin_tokens
        now = np.array([lease.response_tokens for lease in leases], dtype=np.int64)
        longest = np.array([lease.max_tokens - lease.prompt_tokens for lease in leases], dtype=np.int64)
        first = np.minimum(now // width, bins - 1)[:, None]
        ahead = np.arange(bins + 1)[None, :]
        log_survival = self.lengths.log_survival
        at = log_survival[np.minimum(first + ahead, bins)] - log_survival[first]
        survives = np.where(first + ahead <= bins, np.exp(at), 0.0)
        tokens = np.minimum(now[:, None] + ahead * width, longest[:, None]).astype(np.float64)
        return survives * tokens, survives * (1 - survives) * tokens * tokens


POLICIES: dict[str, type[KVBudget]] = {
    "static": CountBudget,
    "least_requests": CountBudget,
    "kv_reserve": KVBudget,
    "kv_adaptive": AdaptiveBudget,
}


def make_budget(policy: str, capacity_tokens: int, max_requests: int) -> KVBudget:
    """The budget named by `rollout.scheduler`. Raises ValueError for an unknown name."""
    if policy not in POLICIES:
        raise ValueError(f"rollout.scheduler={policy!r} is unknown; choose one of {sorted(POLICIES)}")
    return POLICIES[policy](capacity_tokens, max_requests)
