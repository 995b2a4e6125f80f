"""Which groups may begin, and which ones the next batch trains on, so that no token is trained on too late. Pure.

The trainer at weight version v trains tokens of version v - S or newer. A group whose oldest token has version o therefore
has the deadline o + S: the last version at which it may be trained on. A step at version v trains on a batch of B groups.

Two rules keep every group within its deadline. A group begins only if the steps up to its deadline have room for all groups
that are not trained on yet. A batch takes the complete groups with the earliest deadlines, and waits for more of them when
those that remain would not fit the steps up to their deadlines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    oldest: int | None = None  # version of its oldest token; None: it has no token yet
    complete: bool = False


class StalenessSchedule:
    """Groups that are not trained on yet, by number."""

    def __init__(self, batch: int, max_staleness: int, version: int = 0, last_step: int | None = None) -> None:
        """version: of the engines' weights, and of the next batch's. last_step: the step after which none is trained."""
        self.batch, self.max_staleness = batch, max_staleness
        self.engine_version = version
        self.next_version = version
        """Version of the weights that the next batch trains."""
        self._last_step = last_step
        self._groups: dict[int, _Entry] = {}

    # --------------------------------------------------------------------------------------- admission

    @property
    def room(self) -> int:
        """How many more groups may be added now."""
        steps = self.engine_version + self.max_staleness - self.next_version + 1
        if self._last_step is not None:
            steps = min(steps, self._last_step - self.next_version)
        return max(0, steps * self.batch - len(self._groups))

    def add(self, group: int, oldest: int | None = None) -> None:
        """A group that may begin; `oldest` is the version of its oldest token, if it has any."""
        self._groups[group] = _Entry(oldest)

    def begin(self, group: int) -> None:
        """An engine takes the group, so it may have tokens of the present version from now on."""
        if self._groups[group].oldest is None:
            self._groups[group].oldest = self.engine_version

    def new_weights(self, version: int) -> None:
        """The engines have weights `version` from now on."""
        self.engine_version = version

    # -------------------------------------------------------------------------------------- completion

    def complete(self, group: int, oldest: int) -> None:
        """The group can be trained on; its oldest token has version `oldest`."""
        self._groups[group] = _Entry(oldest, complete=True)

    def reopen(self, group: int) -> None:
        """A complete group has lost trajectories, which are rolled out again."""
        self._groups[group].complete = False

    def remove(self, group: int) -> None:
        """The group is not trained on: it was rejected."""
        del self._groups[group]

    @property
    def num_complete(self) -> int:
        return sum(entry.complete for entry in self._groups.values())

    def overdue(self) -> list[int]:
        """Complete groups that no batch may train on any more. Empty unless a run goes on with other settings."""
        return [g for g, entry in self._groups.items() if entry.complete and self._is_overdue(entry)]

    def take(self) -> list[int] | None:
        """The next batch of groups, earliest deadline first, or None while it must be waited for."""
        ready = [g for g, entry in self._groups.items() if entry.complete and not self._is_overdue(entry)]
        chosen = sorted(ready, key=lambda g: self._deadline(self._groups[g]))[: self.batch]
        if len(chosen) < self.batch or not self._rest_fits(chosen):
            return None
        for group in chosen:
            del self._groups[group]
        self.next_version += 1
        return chosen

    def _rest_fits(self, chosen: list[int]) -> bool:
        """Whether the steps after this batch can train all other groups in time.

        Groups that cannot fit in any case, which needs other settings than they began under, are not waited for.
        """
        deadlines = [self._deadline(entry) for entry in self._groups.values() if not self._is_overdue(entry)]
        taken = [self._deadline(self._groups[g]) for g in chosen]
        for deadline in set(deadlines):
            later_steps = deadline - self.next_version
            needed = sum(d <= deadline for d in deadlines) - later_steps * self.batch
            if sum(d <= deadline for d in taken) < min(needed, self.batch):
                return False
        return True

    def _deadline(self, entry: _Entry) -> int:
        oldest = self.engine_version if entry.oldest is None else entry.oldest
        return oldest + self.max_staleness

    def _is_overdue(self, entry: _Entry) -> bool:
        return self._deadline(entry) < self.next_version
