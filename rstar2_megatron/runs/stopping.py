"""Conditions on metrics that end a run or a stage early, or that it warns of. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rstar2_megatron.report.corridor import read_corridor
from rstar2_megatron.settings.load import users_path
from rstar2_megatron.settings.schema import Settings, StopCondition
from rstar2_megatron.training.known_metrics import unknown_metric

Rows = Sequence[Mapping[str, Any]]
"""Metrics of every step from 1."""


def first_that_holds(conditions: Sequence[StopCondition], rows: Rows) -> str:
    """The first condition that the steps so far satisfy, as text, or ""."""
    return next((text for _, text in those_that_hold(conditions, rows)), "")


def those_that_hold(conditions: Sequence[StopCondition], rows: Rows) -> Iterator[tuple[StopCondition, str]]:
    """Every condition that the steps so far satisfy, with its text.

    Values are means over complete spans of `average_over` steps with the metric, counted from the first step; with
    `times_first` they are divided by the mean of the first steps. The last `times` values must all be within the bounds.
    """
    for condition in conditions:
        values = span_means(rows, condition.metric, condition.average_over)[-condition.times :]
        what = condition.metric
        if first := condition.times_first:
            start = span_means(rows, condition.metric, first)[:1]
            values = [value / start[0] for value in values] if start and start[0] else []
            what += f" over its mean of the first {first} steps"
        if len(values) == condition.times and all(_within(condition, value) for value in values):
            shown = ", ".join(f"{value:.4g}" for value in values)
            yield condition, f"{what} {_bounds(condition)} {condition.times} times ({shown})"


def span_means(rows: Rows, metric: str, span: int) -> list[float]:
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


# ------------------------------------------------------------------------------------------------ warnings


def condition_problems(settings: Settings) -> Iterator[str]:
    """Conditions on metrics that no run has, and a corridor that cannot be used."""
    runner = settings.runner
    named = [("stop_when", condition.metric) for condition in runner.stop_when]
    named += [("warn_when", condition.metric) for condition in runner.warn_when or []]
    if runner.corridor:
        try:
            named += [("corridor", name) for name in read_corridor(users_path(runner.corridor)).metrics]
        except ValueError as error:
            yield f"runner.corridor: {error}"
    yield from (f"runner.{key}: {problem}" for key, metric in named if (problem := unknown_metric(metric)))


def signs_of_collapse(settings: Settings) -> list[StopCondition]:
    """Tool calls that explode or vanish and, where answers are boxed, void turns: what `runner.warn_when=null` stands for."""
    calls, void = "rollout/calls_per_trajectory", "rollout/void_turn_ratio"
    signs = [
        StopCondition(metric=calls, at_least=3.0, times_first=5, times=3),
        StopCondition(metric=calls, at_most=0.1, times_first=5, times=3),
    ]
    own = settings.agentloop.environment or settings.agentloop.loop
    boxed = not own and all(term.function == "math" for term in settings.reward.weighted)
    return signs + ([StopCondition(metric=void, at_least=0.3, times=3)] if boxed else [])


class MetricWatch:
    """What a run is warned of, a line each time that it begins."""

    def __init__(self, settings: Settings) -> None:
        runner = settings.runner
        self._conditions = signs_of_collapse(settings) if runner.warn_when is None else runner.warn_when
        self._corridor = read_corridor(users_path(runner.corridor)) if runner.corridor else None
        self._told: set[str] = set()

    def lines(self, rows: Rows, row: dict[str, float]) -> list[str]:
        """Of `row`, the step after `rows`. It gets the number of metrics outside of `runner.corridor`."""
        rows = [*rows, row]
        found = {
            repr(condition): f"{text}: a collapse is likely, see trajectories.jsonl; runner.stop_when can end a run by it"
            for condition, text in those_that_hold(self._conditions, rows)
        }
        if self._corridor:
            outside = dict(self._corridor.outside(rows))
            row["rollout/outside_corridor"] = float(len(outside))
            found |= outside
        new = [text for key, text in found.items() if key not in self._told]
        self._told = set(found)
        return new
