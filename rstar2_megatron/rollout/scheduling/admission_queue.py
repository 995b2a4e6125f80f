"""One engine's queue: which of the trajectories it has taken run now, which make room, when it asks for more. Pure.

Work is pulled, so a slow engine takes less of it. What waits here has been taken from the common queue
(`work_queue`) and stays on this engine, where its group's prompt is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from rstar2_megatron.rollout.scheduling.kv_reservation import KVBudget


@dataclass(slots=True, frozen=True)
class Admission:
    """A trajectory that asks for room; lengths in tokens."""

    key: Hashable
    group: Hashable
    prompt_tokens: int
    max_tokens: int  # prompt and longest possible response
    length: int  # now: the prompt, or more when it goes on from an earlier step


class AdmissionQueue:
    """Admission in order, at the pace of the KV budget; preemption when the budget turns out to be exceeded."""

    def __init__(self, budget: KVBudget) -> None:
        self.budget = budget
        self._waiting: deque[Admission] = deque()
        self._preempted: deque[Admission] = deque()  # before all others

    @property
    def num_waiting(self) -> int:
        return len(self._preempted) + len(self._waiting)

    def add(self, work: Iterable[Admission]) -> None:
        self._waiting.extend(work)

    def wants_work(self) -> bool:
        """True when all that is here runs and there is room for more."""
        return not self.num_waiting and self.budget.has_room()

    def admit(self) -> list[Admission]:
        """Those that may start now. Strictly in order: a long one at the head is not overtaken for ever."""
        admitted = []
        while queue := self._preempted or self._waiting:
            head = queue[0]
            if not self.budget.try_admit(
                head.key, head.group, head.prompt_tokens, head.max_tokens, head.length
            ):
                break
            admitted.append(queue.popleft())
        return admitted

    def preempt(self) -> list[Hashable]:
        """Trajectories to park now, asked after each report of the engine; `requeue` each one when it is parked."""
        return self.budget.preempt()

    def requeue(self, parked: Admission) -> None:
        """A preempted trajectory gives its room back and is the first to get some again, with what it has."""
        self.budget.release(parked.key, finished=False)
        self._preempted.append(parked)

    def withdraw(self) -> list[Admission]:
        """Give back everything that does not run."""
        waiting = [*self._preempted, *self._waiting]
        self._preempted.clear()
        self._waiting.clear()
        return waiting
