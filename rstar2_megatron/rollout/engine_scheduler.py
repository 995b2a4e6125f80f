"""One engine's queue: which of the trajectories it has taken run now, and when it asks for more. Pure.

Work is pulled, so a slow engine takes less of it. What waits here has been taken from the common queue
(`work_queue`) and stays on this engine, where its group's prompt is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from rstar2_megatron.rollout.kv_budget import KVBudget


@dataclass(slots=True, frozen=True)
class Admission:
    """A trajectory that asks for room; lengths in tokens."""

    key: Hashable
    group: Hashable
    prompt_tokens: int
    max_tokens: int  # prompt and longest possible response
    length: int  # now: the prompt, or more when it goes on from an earlier step


class EngineScheduler:
    """Admission in order, at the pace of the KV budget."""

    def __init__(self, budget: KVBudget) -> None:
        self.budget = budget
        self._waiting: deque[Admission] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, work: Iterable[Admission]) -> None:
        self._waiting.extend(work)

    def wants_work(self) -> bool:
        """True when all that is here runs and there is room for more."""
        return not self._waiting and self.budget.has_room()

    def admit(self) -> list[Admission]:
        """Those that may start now. Strictly in order: a long one at the head is not overtaken for ever."""
        admitted = []
        while self._waiting:
            head = self._waiting[0]
            if not self.budget.try_admit(
                head.key, head.group, head.prompt_tokens, head.max_tokens, head.length
            ):
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def withdraw(self) -> list[Admission]:
        """Give back everything that has not started."""
        waiting, self._waiting = list(self._waiting), deque()
        return waiting
