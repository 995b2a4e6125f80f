"""Conditions on metrics that end a run or a stage early. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_megatron.settings.schema import StopCondition


def first_that_holds(conditions: Sequence[StopCondition], rows: Sequence[Mapping[str, Any]]) -> str:
    """The first condition that the steps so far satisfy, as text, or "".

    rows: metrics of every step from 1. Values are means over complete spans of `average_over` steps with the
    metric, counted from the first step. The last `times` values must all be within the bounds.
    """
    for condition in conditions:
        values = span_means(rows, condition.metric, condition.average_over)[-condition.times :]
        if len(values) == condition.times and all(_within(condition, value) for value in values):
            shown = ", ".join(f"{value:.4g}" for value in values)
            return f"{condition.metric} {_bounds(condition)} {condition.times} times ({shown})"
    return ""


def span_means(rows: Sequence[Mapping[str, Any]], metric: str, span: int) -> list[float]:
    """Means of a metric over consecutive complete spans of the steps that have it."""
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    values = [value for value in values if math.isfinite(value)]
    return [sum(values[i : i + span]) / span for i in range(0, len(values) - span + 1, span)]


def _within(condition: StopCondition, value: float) -> bool:
    low = -math.inf if condition.at_least is None else condition.at_least
    high = math.inf if condition.at_most is None else condition.at_most
    return low <= value <= high


def _bounds(condition: StopCondition) -> str:
    if condition.at_most is None:
        return f">= {condition.at_least}"
    return f"<= {condition.at_most}" if condition.at_least is None else f"in {condition.at_least}..{condition.at_most}"
