"""The phase's common queue: which rollouts of which group an engine gets when it asks. Pure; time is an argument.

A group is handed out in slices. Rollouts of a slice share the prompt in an engine's prefix cache, and the slices spread over
the engines. `kv_adaptive` first hands out one slice of every group, then the groups with the longest trajectories first,
because a long trajectory that starts late delays the end of the phase.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rstar2_megatron.rollout.scheduling.length_estimate import GroupDurations
from rstar2_megatron.trajectory import Problem, Trajectory

_LOADS_S = 0.5  # interval at which the engines' loads are recomputed


@dataclass(slots=True)
class Slice:
    """Some rollouts of one group for one engine. `parked` holds the trajectories to resume, by rollout index.

    number: of the group, for the seeds of its requests.
    """

    group: int
    problem: Problem
    indices: list[int]
    parked: dict[int, Trajectory] = field(default_factory=dict)
    number: int = 0


@dataclass(slots=True)
class _Pending:
    """State of one group."""

    group: int
    indices: list[int]
    size: int
    owner: int  # static: its engine
    given: Counter[int] = field(default_factory=Counter)  # number of rollouts by engine
    running: dict[int, tuple[int, float]] = field(default_factory=dict)  # by rollout index: engine, time when it was handed out
    since: float = 0.0  # sum of these times: at 4,096 groups a walk over the rollouts for each slice takes 50 s of a phase

    def stop(self, index: int) -> float | None:
        """Forget a running rollout; returns when it was handed out."""
        if index not in self.running:
            return None
        _, since = self.running.pop(index)
        self.since -= since
        return since


class WorkQueue:
    """Slices of groups for `num_engines` engines under the policy `rollout.scheduler`."""

    def __init__(self, policy: str, num_engines: int, slice_size: int, *, endless: bool = False) -> None:
        """endless: work is added for ever, so nothing balances an end: groups go in the order of arrival, in whole slices."""
        self.policy = policy
        self.endless = endless
        self.num_engines = num_engines
        self.slice_size = 1 if policy == "least_requests" else slice_size
        self._groups: dict[int, _Pending] = {}
        self._pending: list[int] = []  # groups with rollouts to hand out, in order of arrival
        self.left = 0
        """Number of rollouts that no engine has taken."""
        self._durations = GroupDurations()
        self._held = [0] * num_engines  # unfinished rollouts of each engine
        self._loads = [0.0] * num_engines  # expected remaining seconds of these rollouts, summed
        self._loads_at = float("-inf")
        self._alive = list(range(num_engines))

    def add(self, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Add groups, as (group, rollout indices)."""
        for position, (group, indices) in enumerate(groups):
            owner = self._alive[position * len(self._alive) // len(groups)]
            self._groups[group] = _Pending(group, list(indices), len(indices), owner)
            self._pending.append(group)
            self.left += len(indices)

    def forget(self, group: int) -> None:
        """Remove a group of which nothing is left to hand out or runs."""
        del self._groups[group]
        self._durations.forget(group)

    def take(self, engine: int, now: float) -> tuple[int, list[int]] | None:
        """The next slice for `engine`: a group and rollout indices. None when the engine gets nothing now.

        `static` hands out only the engine's own share. `least_requests` serves only the engine with the fewest rollouts.
        `kv_adaptive` makes an engine with an above-average load wait when little is left.
        """
        candidates = self._pending
        if self.policy == "least_requests" and self._held[engine] > min(self._held[e] for e in self._alive):
            return None
        if self.policy == "kv_adaptive" and not self.endless and self._is_above_average_load(engine, now):
            return None
        if self.policy == "static":
            candidates = [group for group in candidates if self._groups[group].owner == engine]
        if not candidates:
            return None
        chosen = self._groups[self._choose(candidates, engine, now)]
        size = len(chosen.indices) if self.policy == "static" else self._slice()
        taken, chosen.indices = chosen.indices[:size], chosen.indices[size:]
        chosen.given[engine] += len(taken)
        chosen.running |= dict.fromkeys(taken, (engine, now))
        chosen.since += len(taken) * now
        self.left -= len(taken)
        self._held[engine] += len(taken)
        self._loads[engine] += len(taken) * self._durations.expected(chosen.group)
        if not chosen.indices:
            self._pending.remove(chosen.group)
        return chosen.group, taken

    def ended(self, engine: int, group: int, index: int, now: float) -> None:
        """Record that a rollout of `engine` has ended or come back."""
        self._held[engine] -= 1
        since = self._groups[group].stop(index)
        if since is not None:
            self._durations.add(group, now - since)

    def give_back(self, group: int, index: int) -> None:
        """Queue a rollout that came back unfinished."""
        pending = self._groups[group]
        if not pending.indices:
            self._pending.append(group)
        pending.indices.append(index)
        self.left += 1

    def lose_engine(self, engine: int) -> None:
        """Remove an engine and divide its static share among the others. At least one engine must remain."""
        self._alive.remove(engine)
        heirs = itertools.cycle(self._alive)
        for pending in self._groups.values():
            if pending.owner == engine:
                pending.owner = next(heirs)

    def take_back(self, engine: int) -> None:
        """Queue again every rollout that `engine` has: its worker died, so none of them comes back."""
        for pending in self._groups.values():
            held = [index for index, (owner, _) in pending.running.items() if owner == engine]
            for index in held:
                pending.stop(index)
                self.give_back(pending.group, index)
        self._held[engine] = 0

    def _choose(self, candidates: list[int], engine: int, now: float) -> int:
        if self.policy != "kv_adaptive" or self.endless:
            return candidates[0]
        for group in candidates:
            if not self._groups[group].given:
                return group

        def urgency(group: int) -> float:
            """Expected duration, reduced by the share of the group that this engine has: lengths in a group correlate."""
            pending = self._groups[group]
            return self._expected(pending, now) * (1 - pending.given[engine] / pending.size)

        return max(candidates, key=urgency)

    def _expected(self, pending: _Pending, now: float) -> float:
        return self._durations.expected(pending.group, len(pending.running) * now - pending.since)

    def _is_above_average_load(self, engine: int, now: float) -> bool:
        """Whether the engine's load is above average.

        Before any trajectory has ended, the load is the number of rollouts. Near the end of the phase it is the expected
        remaining seconds. In between the room in the KV cache decides, and the result is False.
        """
        if not self._held[engine]:
            return False
        if not self._durations.known:
            return self._held[engine] > sum(self._held) / len(self._alive) + self.slice_size
        if self.left >= sum(self._held):
            return False
        if now - self._loads_at >= _LOADS_S:
            self._update_loads(now)
        return self._loads[engine] > sum(self._loads) / len(self._alive)

    def _update_loads(self, now: float) -> None:
        self._loads = [0.0] * self.num_engines
        self._loads_at = now
        for pending in self._groups.values():
            if pending.running:
                expected = self._expected(pending, now)
                for owner, since in pending.running.values():
                    self._loads[owner] += max(0.1 * expected, expected - (now - since))

    def _slice(self) -> int:
        """Size of the next slice: smaller towards the end, so that the last slices balance the engines."""
        if self.endless:
            return self.slice_size
        return max(1, min(self.slice_size, self.left // (2 * self.num_engines)))
