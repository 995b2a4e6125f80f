"""Compares arms: a table, differences with bootstrap intervals, what may be concluded, and what is not comparable. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from rstar2_megatron.records.text_table import aligned
from rstar2_megatron.report.arms import Arm, Point, clock, equal_seeds, last_values
from rstar2_megatron.report.log_formats import Log, Series, some
from rstar2_megatron.report.names import COMPARABLE, DIFFERENT_IN_VERL, LENGTH, PASS_RATE, RESAMPLED, REWARD, Panel

BOOTSTRAPS = 10_000
SEEDS_FOR_A_CONCLUSION = 3

HEADS = ("metric", "arm", "seeds", "steps", "final", "highest (step)", "area under curve, per step", "difference", "of")

# ---------------------------------------------------------------------------------- figures of a curve that is not empty


def final_value(curve: dict[int, Point], last: int) -> float:
    """Mean over the last `last` steps; a metric of fewer steps has fewer values there."""
    return statistics.fmean(last_values({step: p.mean for step, p in curve.items()}, max(curve), last))


def best_value(curve: dict[int, Point]) -> tuple[int, float]:
    """(step, value) of the highest mean."""
    return max(((s, p.mean) for s, p in curve.items()), key=lambda item: item[1])


def area(curve: Series) -> float:
    """Area under the curve by trapezoids, divided by its length in steps: the mean height."""
    steps = sorted(curve)
    if len(steps) < 2:
        return curve[steps[0]]
    total = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in pairwise(steps))
    return total / (steps[-1] - steps[0])


def steps_to_reach(curve: dict[int, Point], level: float) -> int | None:
    """First step whose mean is at least `level`, of a curve that is smoothed already."""
    return next((step for step, point in curve.items() if point.mean >= level), None)


# ------------------------------------------------------------------------------------------- differences


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference of means with its 95 % interval over seeds; no bounds where an arm has one run."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)

    def text(self, digits: int) -> str:
        bounds = "" if self.low is None else f" [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"
        return f"{self.value:+.{digits}f}{bounds}"


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm minus the reference in one metric: at `place` on the axis `x`, and over the last steps up to it."""

    place: float
    at: Interval
    last: Interval
    means: tuple[float, float]
    """Of reference and arm over those steps."""
    seeds: tuple[int, int]
    """Runs with the metric of the reference and of the arm."""
    paired: bool = False

    @property
    def verdict(self) -> str:
        if min(self.seeds) < 2:
            return "nothing may be concluded: one run in an arm, and a second seed may differ as much"
        if min(self.seeds) < SEEDS_FOR_A_CONCLUSION:
            return f"nothing may be concluded from fewer than {SEEDS_FOR_A_CONCLUSION} seeds an arm"
        if self.at.sign and self.at.sign == self.last.sign:
            than = "the differences of equal seeds vary" if self.paired else "the seeds of an arm differ"
            return f"{'higher' if self.at.sign > 0 else 'lower'}, by more than {than}"
        return "no difference may be concluded: an interval holds 0"


def difference(
    reference: Arm, arm: Arm, name: str, *, x: str = "step", last: int = 5, paired: bool = False
) -> Difference | None:
    """Arm minus reference at the last place that every run of both has reached; None where there is none.

    A value between two steps is interpolated. `last` counts the steps up to the place. paired: of runs with equal seeds alone,
    whose differences are then resampled.
    """
    if paired:
        pairs = [[_Curve.of(log, name, x) for log in pair] for pair in equal_seeds(reference, arm)]
        sides = [[curve for pair in pairs if None not in pair and (curve := pair[i])] for i in (0, 1)]
    else:
        sides = [[curve for log in side.logs if (curve := _Curve.of(log, name, x))] for side in (reference, arm)]
    if not all(sides):
        return None
    runs = [curve for side in sides for curve in side]
    place, first = min(c.spent[-1] for c in runs), max(c.spent[0] for c in runs)
    if place < first:
        return None
    at = [[curve.at(place) for curve in side] for side in sides]
    tail = [[curve.before(place, last) for curve in side] for side in sides]
    interval = paired_bootstrap if paired else bootstrap
    means = statistics.fmean(tail[0]), statistics.fmean(tail[1])
    return Difference(place, interval(*at), interval(*tail), means, (len(sides[0]), len(sides[1])), paired)


@dataclass(frozen=True, slots=True)
class _Curve:
    """A run's values of one metric by what it had spent at their steps."""

    spent: list[float]
    series: Series  # its steps are in the order of `spent`

    @classmethod
    def of(cls, log: Log, name: str, x: str) -> _Curve | None:
        clocks, series = clock(log, x), log.aligned(name)
        steps = [step for step in sorted(series) if step in clocks]
        return cls([clocks[s] for s in steps], {s: series[s] for s in steps}) if steps else None

    def at(self, place: float) -> float:
        return float(np.interp(place, self.spent, list(self.series.values())))

    def before(self, place: float, steps: int) -> float:
        """Mean over the last steps up to the place."""
        end = max(step for step, spent in zip(self.series, self.spent, strict=True) if spent <= place)
        return statistics.fmean(last_values(self.series, end, steps))


def bootstrap(reference: Sequence[float], arm: Sequence[float]) -> Interval:
    """mean(arm) - mean(reference), with the 95 % percentile interval over seeds drawn with replacement in each arm.

    Deviations from an arm's mean are widened by sqrt(n / (n - 1)), because n draws from n seeds spread too little.
    """
    value = statistics.fmean(arm) - statistics.fmean(reference)
    if min(len(reference), len(arm)) < 2:
        return Interval(value)
    random = np.random.default_rng(0)
    low, high = np.percentile(_drawn_means(arm, random) - _drawn_means(reference, random), [2.5, 97.5])
    return Interval(value, float(low), float(high))


def paired_bootstrap(reference: Sequence[float], arm: Sequence[float]) -> Interval:
    """As `bootstrap`, of values in the order of the same seeds: what is drawn are the differences of pairs."""
    differences = [b - a for a, b in zip(reference, arm, strict=True)]
    return bootstrap([0.0] * len(differences), differences)


def _drawn_means(values: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """[BOOTSTRAPS] means of n values drawn from n with replacement, widened."""
    seeds = np.asarray(values)
    n = len(seeds)
    drawn = seeds[random.integers(n, size=(BOOTSTRAPS, n))].mean(axis=1)
    return np.asarray(seeds.mean() + (drawn - seeds.mean()) * math.sqrt(n / (n - 1)))


def not_comparable(reference: Arm, arm: Arm, name: str) -> str | None:
    """Why a difference in this metric would be one of definitions, or None."""
    if name in (REWARD, LENGTH) and reference.trains_on_all != arm.trains_on_all:
        whole, part = (reference, arm) if reference.trains_on_all else (arm, reference)
        return (
            f"{whole.label} trains on every rollout and {part.label} on those that rejection and resampling left; "
            "compare pass-rate and length-all"
        )
    if name in DIFFERENT_IN_VERL and reference.kind != arm.kind:
        return COMPARABLE[name]
    return None


@dataclass(frozen=True)
class RunComparison:
    """What a comparison shows: a table, conclusions, and notes."""

    arms: Sequence[Arm]
    panels: Sequence[Panel]
    x: str = "step"
    """A key of `CLOCKS`."""
    last: int = 5
    """Steps that smooth a curve, and that final values and differences are means of."""
    levels: Sequence[float] = ()
    """Rewards whose first step the table names."""
    messages: Sequence[str] = ()
    """What is wrong with logs that give nothing."""
    paired: bool = False
    """Whether runs of equal seeds are compared with each other."""

    def _difference(self, arm: Arm, name: str) -> Difference | None:
        return difference(self.arms[0], arm, name, x=self.x, last=self.last, paired=self.paired)

    @property
    def conclusions(self) -> list[str]:
        """A sentence for each panel and each arm against the first: the differences, and what may be concluded from them."""
        first, *others = self.arms
        lines = []
        for panel in self.panels:
            for arm in others:
                pair = f"{panel.title}, {arm.label} - {first.label}"
                if reason := not_comparable(first, arm, panel.metric):
                    lines.append(f"{pair}: NOT COMPARABLE: {reason}")
                elif found := self._difference(arm, panel.metric):
                    seeds = f"{found.seeds[1]} and {found.seeds[0]} seeds"
                    if self.paired:
                        seeds = f"{found.seeds[0]} {'pair' if found.seeds[0] == 1 else 'pairs'} of equal seeds"
                    lines.append(
                        f"{pair}: {found.at.text(panel.digits)} at {self.x} {found.place:.6g}, "
                        f"{found.last.text(panel.digits)} over the last {self.last} steps ({seeds}): {found.verdict}"
                    )
                elif any(panel.metric in log.series for side in (first, arm) for log in side.logs):
                    lines.append(f"{pair}: not both have it at a common {self.x}")
        return lines

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """(heads, rows): each arm in each panel, against the first arm over the last steps that both have on the axis `x`."""
        heads = [*HEADS, *(f"step of {level:g}" for level in self.levels)]
        rows: list[list[str]] = []
        for panel in self.panels:
            for arm in self.arms:
                curve, digits = arm.curve(panel.metric), panel.digits
                if not curve:
                    continue
                comparable = arm is not self.arms[0] and not not_comparable(self.arms[0], arm, panel.metric)
                gap = self._difference(arm, panel.metric) if comparable else None
                smooth = arm.curve(panel.metric, self.last)
                reached = [steps_to_reach(smooth, level) for level in self.levels]
                best_step, best = best_value(curve)
                rows.append(
                    [
                        panel.metric,
                        arm.label,
                        str(len(arm.logs)),
                        f"{min(curve)}-{max(curve)}",
                        f"{final_value(curve, self.last):.{digits}f}",
                        f"{best:.{digits}f} ({best_step})",
                        f"{area({step: point.mean for step, point in curve.items()}):.{digits}f}",
                        "-" if gap is None else gap.last.text(digits),
                        "-" if gap is None else f"{gap.means[1]:.{digits}f} - {gap.means[0]:.{digits}f}",
                        *("-" if panel.unit != "mean reward" or step is None else str(step) for step in reached),
                    ]
                )
        return heads, rows

    @property
    def faults(self) -> list[str]:
        """What is wrong with the runs themselves: unreadable parts, NaN, unequal lengths. Errors under --strict."""
        logs = [log for arm in self.arms for log in arm.logs]
        notes = [*self.messages, *(message for log in logs for message in log.messages)]
        for panel in self.panels:
            for log in logs:
                steps = sorted(log.not_finite.get(panel.metric, ()))
                if steps:
                    notes.append(
                        f"{log.path}: {panel.metric} is NaN or infinite at {len(steps)} steps ({some(steps)}), marked x"
                    )
        ends = [max(clock(log, "step"), default=0) for log in logs]
        if len(set(ends)) > 1:
            labels = Counter(log.label for log in logs)  # runs in two directories may have one name
            names = [log.label if labels[log.label] == 1 else str(log.path) for log in logs]
            each = ", ".join(f"{name} {end}" for name, end in zip(names, ends, strict=True))
            notes.append(
                f"runs of unequal length ({each} steps): an arm is drawn to the end of its shortest run, and differences are "
                "at the last step that all have"
            )
        return list(dict.fromkeys(notes))  # runs of one file may say the same

    @property
    def caveats(self) -> list[str]:
        """Notes that a reader of these curves needs."""
        notes = [
            f"{panel.metric}: {COMPARABLE[panel.metric]}"
            for panel in self.panels
            if panel.metric in COMPARABLE and any(arm.curve(panel.metric) for arm in self.arms)
        ]
        notes += [f"{arm.label} is {', '.join(log.label for log in arm.logs)}" for arm in self.arms if len(arm.logs) > 1]
        for panel, arm in product(self.panels, self.arms):
            ends = {log.label: max(log.aligned(panel.metric), default=0) for log in arm.logs}
            first = min(ends, key=ends.__getitem__)
            if 0 < ends[first] < min(max(ends.values()), *(max(clock(log, "step"), default=0) for log in arm.logs)):
                notes.append(f"{panel.metric} of {arm.label} ends at step {ends[first]}: {first} has none after it")
        untold = [
            arm.label
            for arm in self.arms
            if arm.kind == "verl" and not (arm.curve(PASS_RATE) or arm.curve(RESAMPLED)) and arm.curve(REWARD)
        ]
        if untold:
            notes.append(f"{', '.join(untold)}: the log does not tell whether its reward is of all rollouts")
        if any(log.first_step == 0 for arm in self.arms for log in arm.logs):
            notes.append("logs whose steps begin at 0 are shifted by one")
        return notes

    @property
    def text(self) -> str:
        heads, rows = self.table
        return "\n".join([aligned([heads, *rows], len(heads)), "", *self.conclusions, "", *self.caveats]) + "\n"
