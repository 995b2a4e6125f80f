"""Which trajectories an engine may run at once, so that its KV cache is full and never overfull.

An engine that admits more than fits evicts running requests and computes their tokens again; one that admits too
few sits idle. The paper's released scheduler is described as reserving, per engine, what surely fits at maximum
length (arXiv 2508.20722, section 3.2); public code has only its commented-out trace.

Pure: tokens and keys come in as arguments, no clock, no engine. The same object runs in production and in the
simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from rstar2_megatron.rollout.length_estimate import RemainingLength


@dataclass(slots=True)
class _Lease:
    group: Hashable
    prompt_tokens: int
    max_tokens: int  # prompt and longest possible response
    length: int  # now
    reserved: int  # response tokens reserved, the shared prompt apart


class KVBudget:
    """Admission by token reservation. Base class: the paper's rule (`kv_reserve`).

    A group's prompt is counted once, because its trajectories share it in the engine's prefix cache.
    """

    def __init__(self, capacity_tokens: int, max_requests: int) -> None:
        if capacity_tokens < 1 or max_requests < 1:
            raise ValueError(
                f"a KV budget needs room: capacity_tokens={capacity_tokens}, max_requests={max_requests}"
            )
        self.capacity_tokens = capacity_tokens
        self.max_requests = max_requests
        self._leases: dict[Hashable, _Lease] = {}
        self._prompts: Counter[Hashable] = Counter()
        self.reserved_tokens = 0

    @property
    def running(self) -> int:
        return len(self._leases)

    def has_slot(self) -> bool:
        """Whether asking for more work makes sense at all."""
        return self.running < self.max_requests and self.reserved_tokens < self.capacity_tokens

    def try_admit(self, key: Hashable, group: Hashable, prompt_tokens: int, max_tokens: int) -> bool:
        """Reserve for one trajectory if it fits; `max_tokens` is prompt and longest response.

        An empty engine takes any trajectory that fits it alone. Raises ValueError for one that never can, and for
        a key already admitted.
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
        lease = _Lease(group, prompt_tokens, max_tokens, prompt_tokens, 0)
        lease.reserved = self._need(lease)
        shared = 0 if self._prompts[group] else prompt_tokens
        if self._leases and not self._fits(lease.reserved + shared):
            return False
        self._leases[key] = lease
        self._prompts[group] += 1
        self.reserved_tokens += lease.reserved + shared
        return True

    def settle(self, key: Hashable, length: int) -> None:
        """The trajectory is `length` tokens long now; its reservation follows."""
        lease = self._leases[key]
        lease.length = length
        need = self._need(lease)
        self.reserved_tokens += need - lease.reserved
        lease.reserved = need

    def release(self, key: Hashable, *, finished: bool = True) -> None:
        """The trajectory ended (`finished`) or was given up; its tokens are free."""
        lease = self._leases.pop(key)
        self._prompts[lease.group] -= 1
        shared = 0
        if not self._prompts[lease.group]:
            del self._prompts[lease.group]
            shared = lease.prompt_tokens
        self.reserved_tokens -= lease.reserved + shared
        if finished:
            self._learn(lease)

    def evicted(self, requests: int) -> None:
        """The engine evicted so many running requests since the last call (0 tells that all is well)."""

    def _fits(self, tokens: int) -> bool:
        return self.reserved_tokens + tokens <= self.capacity_tokens

    def _need(self, lease: _Lease) -> int:
        """Response tokens to reserve."""
        return lease.max_tokens - lease.prompt_tokens

    def _learn(self, lease: _Lease) -> None:
        pass


class StaticBudget(KVBudget):
    """A fixed number of trajectories, whatever they need: what public code does."""

    def has_slot(self) -> bool:
        return self.running < self.max_requests

    def _fits(self, tokens: int) -> bool:
        return True


class AdaptiveBudget(KVBudget):
    """Reserves a quantile of the remaining length seen so far, corrected by the engine's evictions.

    Reserving the maximum leaves most of the cache empty, because few trajectories get there. A quantile of what
    others of this length still needed fills it; evictions raise the quantile, quiet lowers it slowly. Until enough
    trajectories have ended it reserves the maximum.
    """

    def __init__(
        self,
        capacity_tokens: int,
        max_requests: int,
        *,
        quantile: float = 0.6,
        min_quantile: float = 0.4,
        raise_by: float = 0.1,
        lower_by: float = 0.002,
    ) -> None:
        super().__init__(capacity_tokens, max_requests)
        self.quantile = quantile
        self._min_quantile = min_quantile
        self._raise_by = raise_by
        self._lower_by = lower_by
        self._remaining = RemainingLength()

    def _need(self, lease: _Lease) -> int:
        longest = lease.max_tokens - lease.prompt_tokens
        so_far = lease.length - lease.prompt_tokens
        expected = self._remaining.quantile(so_far, self.quantile)
        return longest if expected is None else min(longest, so_far + expected)

    def _learn(self, lease: _Lease) -> None:
        self._remaining.add(lease.length - lease.prompt_tokens)

    def evicted(self, requests: int) -> None:
        step = self._raise_by if requests else -self._lower_by
        self.quantile = min(1.0, max(self._min_quantile, self.quantile + step))


POLICIES: dict[str, type[KVBudget]] = {
    "static": StaticBudget,
    "kv_reserve": KVBudget,
    "kv_adaptive": AdaptiveBudget,
}


def make_budget(policy: str, capacity_tokens: int, max_requests: int) -> KVBudget:
    """The budget named by `rollout.scheduler`. Raises ValueError for an unknown name."""
    if policy not in POLICIES:
        raise ValueError(f"rollout.scheduler={policy!r} is unknown; choose one of {sorted(POLICIES)}")
    return POLICIES[policy](capacity_tokens, max_requests)
