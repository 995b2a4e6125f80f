"""One engine's queue: which trajectories start, which are preempted, when the engine asks for more work. Pure.

Engines pull work, so a slow engine takes less. Waiting trajectories were taken from the common queue (`work_queue`) and
stay on this engine, where the prompt of their group is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget


@dataclass(slots=True, frozen=True)
class WaitingTrajectory:
    """A trajectory that waits for admission; lengths in tokens."""

    key: Any  # hashable
    group: Hashable
    prompt_tokens: int
    max_tokens: int  # prompt and longest possible response
    length: int  # current length: the prompt, or more for a resumed trajectory
    work: Any = None  # the caller's
    since: float = 0.0  # when it began to wait, by the caller's clock


class AdmissionQueue:
    """Admits trajectories in order as far as the KV budget allows, and preempts when the budget is exceeded."""

    def __init__(self, budget: KVBudget) -> None:
        self.budget = budget
        self._waiting: deque[WaitingTrajectory] = deque()
        self._preempted: deque[WaitingTrajectory] = deque()  # admitted before all others

    @property
    def num_waiting(self) -> int:
        return len(self._preempted) + len(self._waiting)

    def add(self, work: Iterable[WaitingTrajectory]) -> None:
        self._waiting.extend(work)

    def wants_work(self) -> bool:
        """True when nothing waits and the budget has room."""
        return not self.num_waiting and self.budget.has_room()

    def admit(self) -> list[WaitingTrajectory]:
        """Trajectories that may start now, strictly in order, so that a long one at the head cannot starve."""
        admitted = []
        while queue := self._preempted or self._waiting:
            head = queue[0]
            if not self.budget.try_admit(head.key, head.group, head.prompt_tokens, head.max_tokens, head.length):
                break
            admitted.append(queue.popleft())
        return admitted

    def requeue(self, parked: WaitingTrajectory) -> None:
        """Release a preempted trajectory's reservation and queue it before all others, with its tokens."""
        self.budget.release(parked.key, finished=False)
        self._preempted.append(parked)

    def withdraw(self) -> list[WaitingTrajectory]:
        """Remove and return every waiting trajectory."""
        waiting = [*self._preempted, *self._waiting]
        self._preempted.clear()
        self._waiting.clear()
        return waiting
