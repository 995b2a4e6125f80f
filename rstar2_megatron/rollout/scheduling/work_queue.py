"""The phase's common queue: which rollouts of which group an engine gets when it asks. Pure; time is an argument.

A group is handed out in slices, so that its rollouts share the prompt in an engine's prefix cache and still spread
over engines. `kv_adaptive` gives out a first slice of every group and then the groups whose trajectories take
longest: a long one started late is the tail that everybody waits for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rstar2_megatron.rollout.scheduling.length_estimate import GroupLengths
from rstar2_megatron.trajectory import Problem, Trajectory

_LOADS_S = 0.5  # after which the engines' loads are weighed anew


@dataclass(slots=True)
class Slice:
    """Some rollouts of one group for one engine; `parked` are those that go on from an earlier step, by index."""

    group: int
    problem: Problem
    indices: list[int]
    parked: dict[int, Trajectory] = field(default_factory=dict)


@dataclass(slots=True)
class _Pending:
    """A group with rollouts to hand out."""

    group: int
    indices: list[int]
    size: int
    given: Counter[int] = field(default_factory=Counter)  # rollouts by engine
    running: dict[int, tuple[int, float]] = field(
        default_factory=dict
    )  # index: engine, when it was handed out


class WorkQueue:
    """Slices of groups for `num_engines` engines under the policy `rollout.scheduler`."""

    def __init__(self, policy: str, num_engines: int, slice_size: int) -> None:
        self.policy = policy
        self.num_engines = num_engines
        self.slice_size = 1 if policy == "least_requests" else slice_size
        self._groups: dict[int, _Pending] = {}
        self._pending: list[int] = []  # groups with something left, in the order of arrival
        self._owner: dict[int, int] = {}  # static: the group's engine
        self._left = 0
        self._lengths = GroupLengths()
        self._held = [0] * num_engines  # rollouts that each engine has
        self._loads = [0.0] * num_engines  # expected seconds of those, all in all
        self._loads_at = float("-inf")
        self._alive = list(range(num_engines))

    @property
    def left(self) -> int:
        """Rollouts that nobody has taken."""
        return self._left

    def add(self, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
        """More groups, as (group, rollout indices)."""
        for position, (group, indices) in enumerate(groups):
            self._groups[group] = _Pending(group, list(indices), len(indices))
            self._pending.append(group)
            self._left += len(indices)
            self._owner[group] = self._alive[position * len(self._alive) // len(groups)]

    def take(self, engine: int, now: float) -> tuple[int, list[int]] | None:
        """The next slice for `engine`: a group and rollout indices. None when there is nothing for it now.

        `static` gives an engine its share and no more; `least_requests` only serves the one with the fewest;
        `kv_adaptive` makes an engine wait that has more to do than the others when little is left.
        """
        candidates = self._pending
        if self.policy == "least_requests" and self._held[engine] > min(self._held[e] for e in self._alive):
            return None
        if self.policy == "kv_adaptive" and self._has_more_than_others(engine, now):
            return None
        if self.policy == "static":
            candidates = [group for group in candidates if self._owner[group] == engine]
        if not candidates:
            return None
        chosen = self._groups[self._choose(candidates, engine, now)]
        size = len(chosen.indices) if self.policy == "static" else self._slice()
        taken, chosen.indices = chosen.indices[:size], chosen.indices[size:]
        chosen.given[engine] += len(taken)
        chosen.running |= dict.fromkeys(taken, (engine, now))
        self._left -= len(taken)
        self._held[engine] += len(taken)
        self._loads[engine] += len(taken) * self._lengths.expected(chosen.group)
        if not chosen.indices:
            self._pending.remove(chosen.group)
        return chosen.group, taken

    def ended(self, engine: int, group: int, index: int, now: float) -> None:
        """A rollout of `engine` ended, well or not."""
        self._held[engine] -= 1
        running = self._groups[group].running.pop(index, None)
        if running is not None:
            self._lengths.add(group, now - running[1])

    def give_back(self, group: int, index: int) -> None:
        """A rollout that came back unfinished can be taken again."""
        pending = self._groups[group]
        if not pending.indices:
            self._pending.append(group)
        pending.indices.append(index)
        self._left += 1

    def lose_engine(self, engine: int) -> None:
        """This engine takes nothing more; the others share what was its own. At least one must remain."""
        self._alive.remove(engine)
        heirs = itertools.cycle(self._alive)
        for group, owner in self._owner.items():
            if owner == engine:
                self._owner[group] = next(heirs)

    def _choose(self, candidates: list[int], engine: int, now: float) -> int:
        if self.policy != "kv_adaptive":
            return candidates[0]
        for group in candidates:
            if not self._groups[group].given:
                return group

        def urgency(group: int) -> float:
            """Long ones first; less so where the engine has many of the group, whose lengths go together."""
            pending = self._groups[group]
            return self._expected(pending, now) * (1 - pending.given[engine] / pending.size)

        return max(candidates, key=urgency)

    def _expected(self, pending: _Pending, now: float) -> float:
        so_far = sum(now - since for _, since in pending.running.values())
        return self._lengths.expected(pending.group, so_far)

    def _has_more_than_others(self, engine: int, now: float) -> bool:
        """Whether the engine has more to do than the average, where room in its cache does not say so.

        That is in the last wave, by expected seconds left, and by number as long as nothing has ended.
        """
        if not self._held[engine]:
            return False
        if not self._lengths.known:
            return self._held[engine] > sum(self._held) / len(self._alive) + self.slice_size
        if self._left >= sum(self._held):
            return False
        if now - self._loads_at >= _LOADS_S:
            self._weigh(now)
        return self._loads[engine] > sum(self._loads) / len(self._alive)

    def _weigh(self, now: float) -> None:
        self._loads = [0.0] * self.num_engines
        self._loads_at = now
        for pending in self._groups.values():
            if pending.running:
                expected = self._expected(pending, now)
                for owner, since in pending.running.values():
                    self._loads[owner] += max(0.1 * expected, expected - (now - since))

    def _slice(self) -> int:
        """Smaller towards the end, so that the last slices even out the engines."""
        return max(1, min(self.slice_size, self._left // (2 * self.num_engines)))
