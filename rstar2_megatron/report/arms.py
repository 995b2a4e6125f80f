"""Arms of a comparison: runs of one configuration under different seeds, their mean curve and its spread. Pure."""

from __future__ import annotations

import json
import re
import reprlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from rstar2_megatron.report.log_formats import Log, Series
from rstar2_megatron.report.names import DRAWN, GENERATED, LENGTH, PASS_RATE, RESAMPLED, SECONDS

# the words of --x, with the label of the axis
CLOCKS = {
    "step": "step",
    "tokens": "response tokens trained on, tool responses included",
    "trajectories": "trajectories trained on",
    "generated": "generated tokens, also of trajectories that were not trained on",
    "time": "hours in steps",
}
_SEED = re.compile(r"[-_.]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)
_SEED_IN_PATH = re.compile(r"seed[-_.=]?\d+(?:-[0-9a-f]{10}\b)?", re.IGNORECASE)
_NOT_THE_WORK = ("runner.experiment_name", "runner.output_dir", "runner.resume_dir", "runner.logger.")


@dataclass(frozen=True, slots=True)
class Point:
    """Mean over an arm's runs and their standard deviation (0 for one run)."""

    mean: float
    deviation: float


@dataclass
class Arm:
    """Runs of one configuration under different seeds."""

    label: str
    logs: list[Log] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """ "verl" or "ours" (RLinf's names)."""
        return self.logs[0].kind if self.logs else "ours"

    @property
    def trains_on_all(self) -> bool:
        """Whether every rollout is trained on, so that `rollout/reward_scores` is the pass rate."""
        for log in self.logs:
            kept, drawn = log.series.get(RESAMPLED), log.series.get(DRAWN)
            if kept is None and PASS_RATE in log.series and log.kind == "verl":
                continue
            if kept is None or drawn is None or any(kept[step] < drawn.get(step, 0) for step in kept):
                return False
        return True

    def curve(self, name: str, smooth: int = 1) -> dict[int, Point]:
        """step -> Point, over the steps that every run of the arm has; each value a mean over the last `smooth` steps."""
        return mean_curve([smoothed(log.aligned(name), smooth) for log in self.logs])

    def clock(self, x: str) -> dict[int, float]:
        """step -> x, a key of `CLOCKS`, mean over the runs; empty when a run does not log what it needs."""
        return {step: point.mean for step, point in mean_curve([clock(log, x) for log in self.logs]).items()}


def mean_curve(runs: Sequence[Series]) -> dict[int, Point]:
    """Mean and deviation at the steps that all runs have: a run that ended early would bend the mean where it ends."""
    common = set(runs[0]).intersection(*runs[1:]) if runs else set()
    columns = {step: [run[step] for run in runs] for step in sorted(common)}
    return {step: Point(statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for step, v in columns.items()}


def smoothed(series: Series, span: int) -> Series:
    """Each value replaced by the mean over the last `span` steps, its own included.

    Steps count, not values: five evaluations may lie fifty steps apart.
    """
    return {step: statistics.fmean(last_values(series, step, span)) for step in series}


def last_values(series: Series, step: int, span: int) -> list[float]:
    """Values of the `span` steps that end with `step`, as far as they have one."""
    return [series[s] for s in range(step - span + 1, step + 1) if s in series]


def clock(log: Log, x: str) -> Series:
    """What a run has spent at the end of each step, by a key of `CLOCKS`; empty when it does not log it."""
    if x == "step":
        curves = [*log.series.values(), *log.not_finite.values()]
        steps = {step for curve in curves for step in curve}
        return {step + 1 - log.first_step: float(step + 1 - log.first_step) for step in steps}
    if x == "time":
        per_step = {step: seconds / 3600 for step, seconds in log.aligned(SECONDS).items()}
    elif x == "generated":
        per_step = log.aligned(GENERATED)
    else:
        rows, lengths = trained_rows(log), log.aligned(LENGTH)
        # a step that trained on nothing has no length
        per_step = {s: n * lengths.get(s, 0.0) for s, n in rows.items()} if x == "tokens" else rows
    total, spent = 0.0, {}
    for step in sorted(per_step):
        total += per_step[step]
        spent[step] = total
    return spent


def trained_rows(log: Log) -> Series:
    """Trajectories trained on in each step. A verl log without the count has it as tokens over tokens a trajectory."""
    if RESAMPLED in log.series:
        return log.aligned(RESAMPLED)
    tokens, prompts, responses = (log.aligned(name) for name in ("perf/total_num_tokens", "rollout/prompt_length", LENGTH))
    return {
        step: float(round(count / (prompts[step] + responses[step])))
        for step, count in tokens.items()
        if prompts.get(step, 0.0) + responses.get(step, 0.0) > 0
    }


# --------------------------------------------------------------------------------------------------- grouping


def group_runs(logs: Sequence[Log]) -> list[Arm]:
    """Runs whose saved configurations are equal but for the seed form an arm; any other run is an arm of its own."""
    groups: dict[object, list[Log]] = {}
    for log in logs:
        work = id(log) if log.settings is None else json.dumps(work_of(log.settings), sort_keys=True, default=str)
        groups.setdefault(work, []).append(log)
    arms = [Arm(arm_label(group), group) for group in groups.values()]
    labels = Counter(arm.label for arm in arms)
    for arm in arms:
        if labels[arm.label] > 1:
            arm.label = f"{arm.label} ({arm.logs[0].path})"
    return arms


def arm_label(logs: Sequence[Log]) -> str:
    """The run's name; that of several seeds without a trailing seed."""
    label = logs[0].label
    if len(logs) > 1:
        label = _SEED.sub("", label) or label
    is_verl = logs[0].kind == "verl" and not label.lower().startswith("verl")
    return f"verl {label}" if is_verl else label


def equal_seeds(one: Arm, two: Arm) -> list[tuple[Log, Log]]:
    """The runs of both arms whose saved configurations have the same seeds."""
    seeds = {_seeds(log): log for log in two.logs if log.settings}
    return [(log, seeds[_seeds(log)]) for log in one.logs if log.settings and _seeds(log) in seeds]


def _seeds(log: Log) -> tuple[Any, ...]:
    return tuple((log.settings or {}).get(part, {}).get("seed") for part in ("actor", "data"))


def work_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration asks for, without seeds and names: equal for two seeds of one experiment."""
    return {
        path: _SEED_IN_PATH.sub("seed", value) if isinstance(value, str) else value
        for path, value in _flat(settings)
        if path.rpartition(".")[2] != "seed" and not path.startswith(_NOT_THE_WORK)
    }


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two configurations of one work differ in, `key=value, now value`; `runner.` keys may differ."""
    before, after = work_of(then), work_of(now)
    return [
        f"{key}={reprlib.repr(before.get(key))}, now {reprlib.repr(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith("runner.")
    ]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, item in items:
        path = f"{prefix}{name}"
        if isinstance(item, Mapping | list) and item:
            yield from _flat(item, path + ".")
        else:
            yield path, item


def check_arms(arms: Sequence[Arm]) -> None:
    """Raises ValueError when one run is named twice, as two places or as a copy, or when an arm mixes codes."""
    for one, two in combinations([log for arm in arms for log in arm.logs], 2):
        same_place = (one.path.resolve(), one.run) == (two.path.resolve(), two.run)
        if same_place or (one.series and one.series == two.series):
            how = "is named twice" if same_place else f"and {two.path} hold the same values at every step"
            raise ValueError(f"{one.path} {how}: one run would count as two seeds; name it once")
    for arm in arms:
        kinds = {log.kind for log in arm.logs}
        if len(kinds) > 1:
            raise ValueError(f"arm {arm.label} mixes runs of {' and '.join(sorted(kinds))}; give each its own --arm")
