"""How much of a step's trajectories the infrastructure may spoil."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rstar2_megatron.trajectory import FinishReason, Group


class TooManyDropped(RuntimeError):
    """Engine, judge or deadlines spoiled too much of a step to train on the rest."""


def check_dropped(groups: Sequence[Group], limit: float, step_size: int | None = None) -> None:
    """Raise TooManyDropped when more than the share `limit` of a step's trajectories ended as INFRASTRUCTURE.

    step_size: trajectories of a step; None: those of `groups`.
    """
    every = [t for group in groups for t in group.trajectories]
    dropped = [t for t in every if t.finish_reason is FinishReason.INFRASTRUCTURE]
    total = step_size or len(every)
    if len(dropped) > limit * total:
        reason, count = Counter(t.error for t in dropped).most_common(1)[0]
        raise TooManyDropped(
            f"{len(dropped)} of the step's {total} trajectories were lost to engine, judge, deadlines or own code, more than "
            f"rollout.max_dropped_share={limit:g}; the step is not trained on. {count} of them: {reason}"
        )
