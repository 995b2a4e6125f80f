"""Conditions that end a stage."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rstar2_megatron.runs.stopping import first_that_holds, span_means
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
