"""What every KV budget keeps: the trajectories that an engine has admitted, their lengths and reservations.

`KVBudget` itself is the paper's rule, `CountBudget` what public code does; `kv_budget.AdaptiveBudget` is ours.
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
        self._reservations: dict[Hashable, KVReservation] = {}
        self._prompts: Counter[Hashable] = Counter()
        self._prompt_tokens = 0  # of the groups that run
        self._reserved = 0  # response tokens
        self._grown = 0  # tokens that were added since the last report
        self._growth = 0  # and between the two before
        self._uncounted = 0  # what the engine holds beyond `used_tokens`
        self._leaving: set[Hashable] = set()  # preempted, not released yet
        self._away: set[Hashable] = set()  # of those, they have no room any more

    @property
    def running(self) -> int:
        return len(self._reservations)

    @property
    def reserved_tokens(self) -> int:
        """Tokens spoken for: never more than the capacity, but for a lone trajectory."""
        return self._prompt_tokens + self._reserved

    @property
    def used_tokens(self) -> int:
        """Tokens that the admitted trajectories have now, shared prompts once."""
        return self._prompt_tokens + sum(
            reservation.response_tokens for reservation in self._reservations.values()
        )

    def has_room(self) -> bool:
        """Whether asking for more work makes sense at all."""
        return self.running < self.max_requests and self.reserved_tokens < self.capacity_tokens

    def room(self) -> int:
        """About how many more trajectories would fit, one at least: how much work to ask for."""
        slots = self.max_requests - self.running
        if self._reservations:
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
        if key in self._reservations:
            raise ValueError(f"trajectory {key!r} is already admitted")
        if max_tokens > self.capacity_tokens:
            raise ValueError(
                f"a trajectory of {max_tokens} tokens never fits a KV cache of {self.capacity_tokens}; raise "
                f"rollout.max_total_tokens or rollout.gpu_memory_utilization, or lower runner.seq_length"
            )
        if self.running >= self.max_requests:
            return False
        reservation = KVReservation(
            group, prompt_tokens, max_tokens, prompt_tokens if length is None else length
        )
        shared = 0 if self._prompts[group] else prompt_tokens
        if self._reservations and not self._fits(reservation, shared):
            return False
        self._reservations[key] = reservation
        self._prompts[group] += 1
        self._prompt_tokens += shared
        self._take(key, reservation)
        return True

    def settle(self, key: Hashable, length: int) -> None:
        """The trajectory is `length` tokens long now; its reservation follows."""
        if key in self._away:
            return
        reservation = self._reservations[key]
        self._grow(reservation, length)
        self._follow(key, reservation)

    def release(self, key: Hashable, *, finished: bool = True) -> None:
        """The trajectory ended (`finished`) or was given up; its tokens are free."""
        self._leaving.discard(key)
        if key in self._away:
            self._away.remove(key)
            return
        reservation = self._remove(key)
        if finished:
            self._learn(reservation)

    def _remove(self, key: Hashable) -> KVReservation:
        reservation = self._reservations.pop(key)
        self._prompts[reservation.group] -= 1
        if not self._prompts[reservation.group]:
            del self._prompts[reservation.group]
            self._prompt_tokens -= reservation.prompt_tokens
        self._give_back(key, reservation)
        return reservation

    def observe(
        self,
        evictions: int,
        lengths: Mapping[Any, int],
        engine_tokens: int = 0,
        at_tools: Collection[Hashable] = (),
    ) -> None:
        """The engine's report, about once a second.

        `evictions`: running requests evicted since the last report (0 tells that all is well); `lengths`: tokens of
        admitted trajectories now, which grow inside a turn too; `engine_tokens`: what the engine itself says that
        its running requests hold; `at_tools`: those that wait for a tool's answer.
        """
        for key, length in lengths.items():
            if key not in self._away:
                self._grow(self._reservations[key], length)
        self._growth, self._grown = self._grown, 0
        self._uncounted = max(0, engine_tokens - self.used_tokens)

    def preempt(self) -> list[Hashable]:
        """After a report: trajectories that have to make room now; each one is named once.

        They ask for room again, with the tokens that they have, after `release`. What a
        policy has reserved surely fits, or is none of its business: nobody here.
        """
        return []

    def _grow(self, reservation: KVReservation, length: int) -> None:
        self._grown += max(0, length - reservation.length)
        reservation.length = length

    # what a policy decides

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        need = reservation.max_tokens - reservation.prompt_tokens + shared
        return self.reserved_tokens + need <= self.capacity_tokens

    def _take(self, key: Hashable, reservation: KVReservation) -> None:
        self._reserved += reservation.max_tokens - reservation.prompt_tokens

    def _follow(self, key: Hashable, reservation: KVReservation) -> None:
        pass

    def _give_back(self, key: Hashable, reservation: KVReservation) -> None:
        self._reserved -= reservation.max_tokens - reservation.prompt_tokens

    def _learn(self, reservation: KVReservation) -> None:
        pass


class CountBudget(KVBudget):
    """A number of trajectories, whatever they need (`static`, `least_requests`): what public code does."""

    def has_room(self) -> bool:
        return self.running < self.max_requests

    def room(self) -> int:
        return max(1, self.max_requests - self.running)

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        return True
