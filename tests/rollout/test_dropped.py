"""A step that lost too many trajectories to infrastructure."""

from __future__ import annotations

import pytest

from rstar2_megatron.rollout.dropped import TooManyDropped, check_dropped
from rstar2_megatron.trajectory import FinishReason, Group, Problem, Trajectory


def step(lost: int, cut: int, usable: int) -> list[Group]:
    reasons = [FinishReason.INFRASTRUCTURE] * lost + [FinishReason.CUT] * cut
    reasons += [FinishReason.ANSWERED] * usable
    trajectories = [Trajectory("q", i, [1], finish_reason=reason) for i, reason in enumerate(reasons)]
    for number, trajectory in enumerate(trajectories[:lost]):
        trajectory.error = "the judge is away" if number else "no engine"
    return [Group(Problem("q", [], ["1"]), trajectories)]


def test_the_reason_is_named() -> None:
    with pytest.raises(TooManyDropped, match=r"3 of the step's 10 .*=0.25; .* 2 of them: the judge is away"):
        check_dropped(step(3, 2, 5), 0.25)


def test_up_to_the_limit_a_step_is_trained_on() -> None:
    check_dropped(step(2, 3, 3), 0.25)
    check_dropped(step(0, 8, 0), 0.0)
    check_dropped([], 0.0)
