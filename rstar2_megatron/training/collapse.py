"""Detects a ruined run, so that it ends with a message. Pure.

Two signs: consecutive steps whose groups are all rejected, and a fall of pass rate or log-probs right after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""One step of metrics.jsonl."""

PASS_RATE, LOG_PROB = "rollout/pass_rate", "rollout/logprob_mean"
_STEPS_BEFORE = 5  # of the run before the resume, that its first steps are compared with
_STEPS_AFTER = 3
_SIGMA = 3.0
_LOG_PROB_FACTOR, _LOG_PROB_RISE, _LOG_PROB_FALL = 3.0, 0.2, 0.5
"""Nats from which a change counts: of a model that is nearly sure, one rare token of a small step is several times the mean."""


class CollapseError(RuntimeError):
    """The policy is ruined; the message gives the figures and the remedy."""


class EmptySteps(CollapseError):
    """No step of the last few had a group to train on."""


class CollapseWatch:
    """Checks each step's metrics."""

    def __init__(self, max_empty_steps: int, before_resume: Sequence[Row] = ()) -> None:
        """max_empty_steps: consecutive steps without a kept group that end the run; 0: any number is allowed.

        before_resume: the steps of this run until the checkpoint that it resumed from; empty for a new run, and when
        the first steps are not to be compared with them.
        """
        self._max_empty_steps = max_empty_steps
        self._before = list(before_resume[-_STEPS_BEFORE:])
        self._after: list[Row] = []
        self._empty: list[Row] = []

    @property
    def compares_with_before(self) -> bool:
        """Whether the next step is one of the first after a resume."""
        return bool(self._before) and len(self._after) < _STEPS_AFTER

    def add(self, row: Row) -> None:
        """Raise CollapseError when the run, with this step, shows a sign of ruin."""
        if self.compares_with_before:
            self._after.append(row)
            _check_resumed(self._before, self._after)
        self._empty = [] if row.get("rollout/groups_kept") else [*self._empty, row]
        if self._max_empty_steps and len(self._empty) >= self._max_empty_steps:
            raise EmptySteps(_empty_message(self._empty))


def _pass_rate_fell(old: float, new: float, groups: float) -> bool:
    """The pass rate must not have halved by more than chance allows.

    Chance: groups are independent and each is, at worst, all right or all wrong; then the standard error of a mean over
    n groups is sqrt(p (1 - p) / n). Both means count groups of their steps.
    """
    error = math.sqrt(max(old * (1 - old), 0.0) / groups)
    return new < old / 2 and old - new > _SIGMA * error


def _log_prob_fell(old: float, new: float, groups: float) -> bool:
    """The mean log-prob of generated tokens must stay within a factor of 3: training moves it by percents."""
    if new > old:
        return new - old > _LOG_PROB_RISE and new > old / _LOG_PROB_FACTOR
    return old - new > _LOG_PROB_FALL and new < old * _LOG_PROB_FACTOR


_CLIFFS = ((PASS_RATE, "pass rate", _pass_rate_fell), (LOG_PROB, "mean log-prob of generated tokens", _log_prob_fell))


def _check_resumed(before: Sequence[Row], after: Sequence[Row]) -> None:
    for metric, what, fell in _CLIFFS:
        (old, _), (new, groups) = _mean(before, metric), _mean(after, metric)
        if not (math.isnan(old) or math.isnan(new)) and fell(old, new, groups):
            first, last = before[0]["step"], before[-1]["step"]
            raise CollapseError(
                f"after the resume from step {last:.0f} the {what} {'rose sharply' if new > old else 'fell off a cliff'}: "
                f"{metric} {old:.4g} over steps "
                f"{first:.0f} to {last:.0f}, {new:.4g} over the {len(after)} steps since. The checkpoint of step {last:.0f} is "
                "kept and none was written since. Check that data, sampling and model are those of the run before; "
                "runner.check_after_resume=False goes on all the same"
            )


def _mean(rows: Sequence[Row], metric: str) -> tuple[float, float]:
    """(mean weighted by groups, number of groups) over the rows that have the metric; (nan, 0) without any."""
    pairs = [(float(row[metric]), float(row["rollout/groups"])) for row in rows if row.get(metric) is not None]
    groups = sum(weight for _, weight in pairs)
    return (sum(value * weight for value, weight in pairs) / groups if groups else math.nan), groups


def _empty_message(rows: Sequence[Row]) -> str:
    reasons = {
        reason: sum(row.get(f"rollout/groups_rejected_{reason}", 0) for row in rows)
        for reason in ("all_correct", "all_wrong", "too_few")
    }
    counted = ", ".join(f"{count:.0f} {reason.replace('_', ' ')}" for reason, count in reasons.items() if count)
    remedy = (
        "the problems are too easy for this model: filter them (runner.task_type=difficulty_filter) or take harder ones"
        if reasons["all_correct"] >= reasons["all_wrong"]
        else "the model solves nothing: look at trajectories.jsonl, resume from an earlier global_step_N by runner.resume_dir, "
        "or take easier problems"
    )
    return (
        f"no step from {rows[0]['step']:.0f} to {rows[-1]['step']:.0f} had a group to train on "
        f"(rejected: {counted or 'none'}); {remedy}. runner.max_empty_steps={len(rows)} ends a run then; 0 never does"
    )
