"""Conditions that end a stage."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rstar2_megatron.runs.stopping import MetricWatch, condition_problems, first_that_holds, span_means
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.schema import StopCondition

CLIP = "rollout/clip_ratio"


def rows(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": n, **({} if v is None else {CLIP: v})} for n, v in enumerate(values, 1)]


def held(values: list[float | None], **condition: Any) -> str:
    return first_that_holds([StopCondition(metric=CLIP, **condition)], rows(*values))


def test_so_many_values_in_a_row() -> None:
    assert not held([0.1, 0.12], at_least=0.1, times=3)
    assert not held([0.1, 0.05, 0.12, 0.12], at_least=0.1, times=3)
    assert held([0.0, 0.1, 0.12, 0.2], at_least=0.1, times=3) == ("rollout/clip_ratio >= 0.1 3 times (0.1, 0.12, 0.2)")
    assert held([0.5, 0.04], at_most=0.05) and not held([0.5, 0.06], at_most=0.05)
    assert held([0.1], at_least=0.08, at_most=0.12) and not held([0.2], at_least=0.08, at_most=0.12)


def test_steps_without_the_metric_are_no_values() -> None:
    """Evaluations come every few steps only."""
    assert held([None, 0.2, None, None, 0.3, None], at_least=0.1, times=2)
    assert not held([None, None], at_least=0.1)


def test_means_are_over_whole_spans_from_the_first_step() -> None:
    assert span_means(rows(0.0, 0.2, 0.1, 0.3, 0.9), CLIP, 2) == pytest.approx([0.1, 0.2])
    assert held([0.0, 0.2, 0.1, 0.3, 0.9], at_least=0.1, times=2, average_over=2)
    assert not held([0.0, 0.1, 0.3, 0.3, 0.9], at_least=0.1, times=2, average_over=2)
    assert span_means(rows(0.1, float("nan"), 0.3), CLIP, 1) == [0.1, 0.3]


def test_any_condition_will_do_and_none_never_holds() -> None:
    conditions = [StopCondition(metric="eval/average", at_least=0.5), StopCondition(metric=CLIP, at_least=0.1)]
    assert first_that_holds(conditions, rows(0.2)).startswith(CLIP)
    assert first_that_holds([], rows(0.2)) == ""
    with pytest.raises(ValidationError, match="at_least or at_most"):
        StopCondition(metric=CLIP)
    with pytest.raises(ValidationError, match=r"at_least=0\.5 is above at_most=0\.1"):
        StopCondition(metric=CLIP, at_least=0.5, at_most=0.1)


def test_bounds_may_be_factors_of_the_first_steps() -> None:
    values = [1.0, 1.0, 4.0, 6.0, 6.5]
    said = "rollout/clip_ratio over its mean of the first 3 steps >= 3.0 2 times (3, 3.25)"
    assert held(values, at_least=3.0, times=2, times_first=3) == said
    assert not held(values[:4], at_least=3.0, times=2, times_first=3)
    assert not held([0.0, 0.0, 5.0], at_least=3.0, times_first=2), "no factor of 0"
    assert not held([1.0, 5.0], at_least=1.0, times_first=3), "the first steps are not complete"


CALLS, VOID = "rollout/calls_per_trajectory", "rollout/void_turn_ratio"


def warned(calls: list[float], void: list[float], *words: str) -> list[tuple[int, str]]:
    """(step, metric) of each warning."""
    watch = MetricWatch(load_settings("rstar2-tiny-cpu", words))
    steps = [{"step": n, CALLS: c, VOID: v} for n, (c, v) in enumerate(zip(calls, void, strict=True), 1)]
    return [(n, line.split()[0]) for n in range(1, len(steps) + 1) for line in watch.lines(steps[:n])]


def test_signs_of_a_collapse_are_told_once_each_time_that_they_begin() -> None:
    quiet = [0.0] * 14
    assert warned([1.0, 1.2, 0.8, 1.1, 0.9, *[1.5] * 9], quiet) == []
    assert warned([1.0] * 5 + [4.0] * 5 + [1.0] + [4.0] * 3, quiet) == [(8, CALLS), (14, CALLS)]
    assert warned([1.0] * 5 + [0.05] * 9, quiet) == [(8, CALLS)]
    assert warned([1.0] * 14, [0.1] * 4 + [0.4] * 10) == [(7, VOID)]
    assert warned([1.0] * 14, [0.4] * 14, "reward.function=environment") == [], "another answer than a box"
    assert warned([1.0] * 5 + [4.0] * 9, quiet, "runner.warn_when=[]") == []
    own = f"runner.warn_when=[{{metric: {CALLS}, at_least: 2, times: 2}}]"
    assert warned([1.0] * 5 + [4.0] * 9, quiet, own) == [(7, CALLS)]


def test_a_condition_on_no_metric_is_refused_with_the_nearest() -> None:
    settings = load_settings("rstar2-tiny-cpu", ["runner.stop_when=[{metric: rollout/clip_ratios, at_least: 0.5}]"])
    (problem,) = condition_problems(settings)
    assert problem.startswith(
        "runner.stop_when: no run has a metric 'rollout/clip_ratios'; the nearest are rollout/clip_ratio,"
    )
    assert not list(condition_problems(load_settings("rstar2-tiny-cpu", ["runner.warn_when=[]"])))
