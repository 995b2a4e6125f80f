"""State of every KV budget: the admitted trajectories of an engine, their lengths and reservations.

`KVBudget` is the paper's rule, `CountBudget` that of public code. `adaptive_budget.AdaptiveBudget` is this project's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class KVReservation:
    """One admitted trajectory; lengths in tokens, prompt included."""

    group: Hashable
    prompt_tokens: int
    max_tokens: int  # prompt and longest possible response
    length: int  # current

    @property
    def response_tokens(self) -> int:
        return self.length - self.prompt_tokens


class KVBudget:
    """Admission by reservation. The base class reserves each trajectory's maximum: the paper's rule (`kv_reserve`).

    A group's prompt counts once, because its trajectories share it in the engine's prefix cache.
    """

    def __init__(self, capacity_tokens: int, max_requests: int) -> None:
        if capacity_tokens < 1 or max_requests < 1:
            raise ValueError(f"a KV budget needs room: capacity_tokens={capacity_tokens}, max_requests={max_requests}")
        self.capacity_tokens = capacity_tokens
        self.max_requests = max_requests
        self._reservations: dict[Hashable, KVReservation] = {}
        self._prompts: Counter[Hashable] = Counter()
        self._prompt_tokens = 0  # prompts of running groups
        self._reserved = 0  # response tokens
        self._uncounted = 0  # tokens that the engine holds beyond `used_tokens`
        self._leaving: set[Hashable] = set()  # preempted and not released yet
        self._away: set[Hashable] = set()  # the part of `_leaving` whose reservation is already freed

    @property
    def running(self) -> int:
        return len(self._reservations)

    @property
    def reserved_tokens(self) -> int:
        """Reserved tokens. They exceed the capacity only when a single trajectory runs."""
        return self._prompt_tokens + self._reserved

    @property
    def used_tokens(self) -> int:
        """Current tokens of the admitted trajectories, with shared prompts counted once."""
        return self._prompt_tokens + sum(reservation.response_tokens for reservation in self._reservations.values())

    def has_room(self) -> bool:
        """Whether the engine should ask for more work."""
        return self.running < self.max_requests and self.reserved_tokens < self.capacity_tokens

    def room(self) -> int:
        """Estimated number of further trajectories that fit, at least 1."""
        slots = self.max_requests - self.running
        if self._reservations:
            each = max(1, self.reserved_tokens // self.running)
            slots = min(slots, (self.capacity_tokens - self.reserved_tokens) // each)
        return max(1, slots)

    def try_admit(self, key: Hashable, group: Hashable, prompt_tokens: int, max_tokens: int, length: int | None = None) -> bool:
        """Reserve for one trajectory if it fits. `max_tokens` is prompt and longest response.

        `length` is the current length of a resumed trajectory. An empty engine admits any trajectory that fits alone.
        Raises ValueError for a trajectory that can never fit, and for a key that is already admitted.
        """
        if key in self._reservations:
            raise ValueError(f"trajectory {key!r} is already admitted")
        if max_tokens > self.capacity_tokens:
            raise ValueError(
                f"a trajectory of {max_tokens} tokens never fits a KV cache of {self.capacity_tokens}; raise "
                f"rollout.max_total_tokens or rollout.gpu_memory_utilization, or lower runner.seq_length"
            )
        if self.running >= self.max_requests:
            return False
        reservation = KVReservation(group, prompt_tokens, max_tokens, prompt_tokens if length is None else length)
        shared = 0 if self._prompts[group] else prompt_tokens
        if self._reservations and not self._fits(reservation, shared):
            return False
        self._reservations[key] = reservation
        self._prompts[group] += 1
        self._prompt_tokens += shared
        self._reserve(key, reservation)
        return True

    def set_length(self, key: Hashable, length: int) -> None:
        if key in self._away:
            return
        reservation = self._reservations[key]
        reservation.length = length
        self._length_changed(key, reservation)

    def release(self, key: Hashable, *, finished: bool = True) -> None:
        """Free the reservation of a trajectory that ended (`finished`) or stopped unfinished."""
        self._leaving.discard(key)
        if key in self._away:
            self._away.remove(key)
            return
        reservation = self._remove(key)
        if finished:
            self._learn_length(reservation)

    def _remove(self, key: Hashable) -> KVReservation:
        reservation = self._reservations.pop(key)
        self._prompts[reservation.group] -= 1
        if not self._prompts[reservation.group]:
            del self._prompts[reservation.group]
            self._prompt_tokens -= reservation.prompt_tokens
        self._unreserve(key, reservation)
        return reservation

    def observe(
        self, evictions: int, lengths: Mapping[Any, int], engine_tokens: int = 0, at_tools: Collection[Hashable] = ()
    ) -> None:
        """Take an engine report (about one a second).

        `evictions`: running requests evicted since the last report. `lengths`: current tokens of admitted trajectories,
        which also grow within a turn. `engine_tokens`: tokens that running requests hold by the engine's own count.
        `at_tools`: trajectories that wait for a tool's response.
        """
        for key, length in lengths.items():
            if key not in self._away:
                self._reservations[key].length = length
        self._uncounted = max(0, engine_tokens - self.used_tokens)

    def preempt(self) -> list[Hashable]:
        """Trajectories to park after a report. Each one is named once, and is admitted again after `release` (`requeue`).

        Base policies never preempt.
        """
        return []

    # overridden by policies

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        need = reservation.max_tokens - reservation.prompt_tokens + shared
        return self.reserved_tokens + need <= self.capacity_tokens

    def _reserve(self, key: Hashable, reservation: KVReservation) -> None:
        self._reserved += reservation.max_tokens - reservation.prompt_tokens

    def _length_changed(self, key: Hashable, reservation: KVReservation) -> None:
        pass

    def _unreserve(self, key: Hashable, reservation: KVReservation) -> None:
        self._reserved -= reservation.max_tokens - reservation.prompt_tokens

    def _learn_length(self, reservation: KVReservation) -> None:
        pass


class CountBudget(KVBudget):
    """Admits up to `max_requests` trajectories of any length (`static`, `least_requests`), as public code does."""

    def has_room(self) -> bool:
        return self.running < self.max_requests

    def room(self) -> int:
        return max(1, self.max_requests - self.running)

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        return True
