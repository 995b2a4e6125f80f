"""One rollout phase on the driver: its open and complete groups, and when the phase is over.

Pure: engines take work by `take`, results arrive by `ended`, time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rstar2_megatron.rollout.scheduling.work_queue import Slice, WorkQueue
from rstar2_megatron.trajectory import FinishReason, Group, Problem, Trajectory, oldest_version

Tail = Literal["wait", "cut", "carry"]
# arguments: a group's graded trajectories, and how many are missing; True if the missing ones may be cut
MayCut = Callable[[Sequence[Trajectory], int], bool]


@dataclass(slots=True)
class OpenGroup:
    """An unfinished group. Trajectories are keyed by rollout index."""

    problem: Problem
    size: int
    ended: dict[int, Trajectory] = field(default_factory=dict)
    parked: dict[int, Trajectory] = field(default_factory=dict)
    carried: int = 0  # phases that ended before this group did
    number: int = 0  # for the seeds of its requests (`engine.seeds`)

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.ended]

    @property
    def oldest_version(self) -> int | None:
        """Weight version of its oldest tokens; None before the first."""
        return oldest_version([*self.ended.values(), *self.parked.values()])

    def close(self) -> Group:
        """The group in rollout order. Missing trajectories end as CUT and keep the tokens of an earlier phase."""
        for index in self.missing:
            cut = self.parked.pop(index, None) or Trajectory(self.problem.query_id, index)
            cut.finish_reason = FinishReason.CUT
            self.ended[index] = cut
        return Group(self.problem, [self.ended[index] for index in sorted(self.ended)])


@dataclass
class Unfinished:
    """Everything that was rolled out, or begun, and not trained on: the part of a checkpoint that no loader can repeat."""

    open: list[OpenGroup] = field(default_factory=list)
    complete: list[Group] = field(default_factory=list)
    """The buffer: groups that wait to be trained on."""
    rejected: list[Group] = field(default_factory=list)
    """Rejected since the last step, whose metrics have not counted them."""
    again: list[Problem] = field(default_factory=list)
    """Problems whose groups became too old, to be rolled out again."""
    begun: int = 0
    """Groups that were begun in the run so far."""


@dataclass
class RolloutPhase:
    """Groups of `group_size` rollouts each. `tail` (`rollout.tail` of the YAML) sets when the phase is over."""

    queue: WorkQueue
    group_size: int
    tail: Tail = "wait"
    may_cut: MayCut = lambda ended, missing: False
    carry_share: float = 0.1
    max_carry_age: int = 1
    next_number: int = 0
    """Number of the group that will be added next."""
    open_groups: dict[int, OpenGroup] = field(default_factory=dict)
    """By number."""
    reported: Counter[int] = field(default_factory=Counter)
    """Trajectories that came back from each engine, parked ones included."""
    handed_out: bool = False  # the phase is ending: engines get no more work
    _closed: dict[int, OpenGroup] = field(default_factory=dict)

    def add(self, groups: Sequence[OpenGroup]) -> range:
        """Add groups to roll out; returns their numbers. A group of an earlier phase keeps its trajectories."""
        numbers = range(self.next_number, self.next_number + len(groups))
        self.next_number += len(groups)
        self.open_groups |= dict(zip(numbers, groups, strict=True))
        self.queue.add([(number, group.missing) for number, group in zip(numbers, groups, strict=True)])
        return numbers

    def add_problems(self, problems: Sequence[Problem], number: int = 0) -> range:
        return self.add([OpenGroup(problem, self.group_size, number=number) for problem in problems])

    def forget(self, number: int) -> None:
        """Remove a complete group, if it is of this phase: `finish` does not return it, no worker's death opens it again."""
        if self._closed.pop(number, None) is not None:
            self.queue.forget(number)

    def take(self, engine: int, room: int, now: float) -> list[Slice]:
        """Work for `engine`: one slice, or several if it has room and enough is left for the others."""
        slices: list[Slice] = []
        wanted = min(room, self.queue.left // (2 * self.queue.num_engines))
        while (taken := self.queue.take(engine, now)) is not None:
            number, indices = taken
            group = self.open_groups[number]
            parked = {index: group.parked.pop(index) for index in indices if index in group.parked}
            slices.append(Slice(number, group.problem, indices, parked, group.number))
            wanted -= len(indices)
            if wanted <= 0 and self.queue.policy != "static":
                break
        return slices

    def ended(self, engine: int, number: int, trajectory: Trajectory, now: float) -> Group | None:
        """Record a trajectory that came back. Returns its group when the group is complete.

        A trajectory without a finish reason was parked at the end of the phase, or its engine was lost. After an engine
        loss it is queued again.
        """
        self.reported[engine] += 1
        group = self.open_groups[number]
        self.queue.ended(engine, number, trajectory.rollout_index, now)
        if trajectory.finish_reason is None:
            group.parked[trajectory.rollout_index] = trajectory
            if not self.handed_out:
                self.queue.give_back(number, trajectory.rollout_index)
            return None
        group.ended[trajectory.rollout_index] = trajectory
        if group.missing:
            return None
        self._closed[number] = self.open_groups.pop(number)
        return group.close()

    def lose_worker(self, engine: int) -> list[int]:
        """The worker of `engine` died: what it ran is queued again, and what it ended too, because it held those tokens.

        When a phase is ending that no later one goes on from, what it ended in complete groups is dropped as INFRASTRUCTURE.
        Returns the numbers of complete groups that are open again.
        """
        self.reported.pop(engine, None)
        reopened: list[int] = []
        last = self.handed_out and not self.queue.endless
        if not self.handed_out:
            self.queue.take_back(engine)
        for number, group in {**self.open_groups, **self._closed}.items():
            held = [i for i, t in group.ended.items() if t.held and t.held.worker == engine]
            if held and number in self._closed and last:
                drop_held([group.ended[index] for index in held], engine)
                continue
            for index in held:
                del group.ended[index]
                if not self.handed_out:
                    self.queue.give_back(number, index)
            if held and number in self._closed:
                self.open_groups[number] = self._closed.pop(number)
                reopened.append(number)
        return reopened

    @property
    def num_open(self) -> int:
        return len(self.open_groups)

    @property
    def num_closed(self) -> int:
        return len(self._closed)

    @property
    def over(self) -> bool:
        """Whether the phase can end without waiting for further trajectories."""
        if not self.open_groups:
            return True
        if self.tail == "cut":
            return all(
                self.may_cut([t for t in group.ended.values() if t.usable], len(group.missing))
                for group in self.open_groups.values()
            )
        if self.tail == "carry":
            few = len(self.open_groups) <= self.carry_share * (len(self.open_groups) + len(self._closed))
            return few and all(group.carried < self.max_carry_age for group in self.open_groups.values())
        return False

    def finish(self) -> tuple[list[Group], list[OpenGroup]]:
        """(groups of this phase in their order, groups carried into the next phase)."""
        carried: list[OpenGroup] = []
        if self.tail == "carry":
            carried = list(self.open_groups.values())
            for group in carried:
                group.carried += 1
        else:
            self._closed |= self.open_groups
        return [self._closed[number].close() for number in sorted(self._closed)], carried


def drop_held(trajectories: Iterable[Trajectory], worker: int) -> None:
    """Drop as INFRASTRUCTURE those whose tokens the dead rollout worker `worker` held."""
    for trajectory in trajectories:
        if trajectory.held and trajectory.held.worker == worker:
            trajectory.held = None
            trajectory.finish_reason = FinishReason.INFRASTRUCTURE
            trajectory.error = f"rollout worker {worker} died with its tokens"


def problems_to_refill(survivors: int, open_groups: int, target: int, min_share: float, left: int) -> int:
    """How many more problems a step needs so that `min_share` of `target` groups can survive rejection.

    `survivors` groups have survived, `open_groups` may still survive. At most `left` more problems are allowed.
    """
    return max(0, min(left, math.ceil(min_share * target) - survivors - open_groups))
