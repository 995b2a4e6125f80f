"""Compares curves of several runs: arms of seeds, a figure, a table, and notes on what is not comparable."""

from __future__ import annotations

import base64
import html
import io
import re
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rstar2_megatron.report.names import COMPARABLE, LENGTH, PASS_RATE, RESAMPLED, REWARD
from rstar2_megatron.report.read import Log, Series

LAST = 5  # steps of the final value
PANELS = ((REWARD, "Reward (after resampling)"), (LENGTH, "Response length (tokens)"))
_SEED = re.compile(r"[-_.]?(?:seed|s)[-_.=]?\d+$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Point:
    """Mean over the seeds that have this step, and their standard deviation (0 for one seed)."""

    mean: float
    deviation: float
    seeds: int

    @property
    def low(self) -> float:
        return self.mean - self.deviation

    @property
    def high(self) -> float:
        return self.mean + self.deviation


@dataclass
class Arm:
    """Runs of one configuration under different seeds."""

    label: str
    logs: list[Log] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """ "verl" or "ours" (RLinf's names)."""
        return self.logs[0].kind if self.logs else "ours"

    def curve(self, name: str) -> dict[int, Point]:
        """step -> Point, steps counted from 1."""
        columns: dict[int, list[float]] = {}
        for log in self.logs:
            for step, value in log.aligned(name).items():
                columns.setdefault(step, []).append(value)
        return {
            step: Point(
                statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values)
            )
            for step, values in sorted(columns.items())
        }


def arm_label(log: Log) -> str:
    """The run's name without a trailing seed, so that seeds of one configuration form one arm."""
    bare = _SEED.sub("", log.label) or log.label
    return f"verl {bare}" if log.kind == "verl" and not bare.lower().startswith("verl") else bare


def group_arms(logs: Sequence[tuple[str | None, Log]]) -> list[Arm]:
    """Arms by label; a None label is found by `arm_label`. Logs without curves are left out."""
    arms: dict[str, Arm] = {}
    for label, log in logs:
        if log.series:
            name = label or arm_label(log)
            arms.setdefault(name, Arm(name)).logs.append(log)
    return list(arms.values())


# ------------------------------------------------------------------------------------------------ figures


def final_value(curve: dict[int, Point]) -> float | None:
    """Mean over the last LAST steps."""
    tail = list(curve.values())[-LAST:]
    return statistics.fmean(p.mean for p in tail) if tail else None


def best_value(curve: dict[int, Point]) -> tuple[int, float] | None:
    """(step, value) of the highest mean."""
    return max(((s, p.mean) for s, p in curve.items()), key=lambda item: item[1], default=None)


def area(curve: Series) -> float | None:
    """Area under the curve by trapezoids, divided by its length in steps: the mean height."""
    steps = sorted(curve)
    if len(steps) < 2:
        return curve[steps[0]] if steps else None
    total = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in pairwise(steps))
    return total / (steps[-1] - steps[0])


def steps_to_reach(curve: dict[int, Point], level: float) -> int | None:
    """First step whose mean, smoothed over LAST steps, is at least `level`."""
    window: list[float] = []
    for step, point in curve.items():
        window = [*window[-(LAST - 1) :], point.mean]
        if statistics.fmean(window) >= level:
            return step
    return None


def largest_gap(a: dict[int, Point], b: dict[int, Point]) -> tuple[int, float] | None:
    """(step, b - a) where the means differ most, over the steps both have."""
    common = [(step, b[step].mean - a[step].mean) for step in a if step in b]
    return max(common, key=lambda item: abs(item[1]), default=None)


def bands_separate(a: dict[int, Point], b: dict[int, Point]) -> str:
    """Whether the bands of mean +- deviation do not overlap on any of the last LAST common steps."""
    common = [step for step in a if step in b][-LAST:]
    if not common:
        return "no common steps"
    if any(a[s].seeds < 2 or b[s].seeds < 2 for s in common):
        return "unknown (needs 2 seeds an arm)"
    apart = all(a[s].high < b[s].low or b[s].high < a[s].low for s in common)
    return "yes" if apart else "no"


HEADS = (
    "metric",
    "arm",
    "seeds",
    "steps",
    "final",
    "best (step)",
    "area under curve, per step",
    "largest gap (step)",
    "bands apart",
)


def comparison_table(arms: Sequence[Arm], levels: Sequence[float]) -> tuple[list[str], list[list[str]]]:
    """(heads, rows): each arm against the first, for reward, length and pass rate."""
    heads = [*HEADS, *(f"step of reward {level:g}" for level in levels)]
    rows: list[list[str]] = []
    for name in (REWARD, PASS_RATE, LENGTH):
        digits = 0 if name == LENGTH else 3
        reference = arms[0].curve(name) if arms else {}
        for i, arm in enumerate(arms):
            curve = arm.curve(name)
            if not curve:
                continue
            best = best_value(curve)
            gap = largest_gap(reference, curve) if i and reference else None
            height = area({step: point.mean for step, point in curve.items()})
            reached = [steps_to_reach(curve, level) for level in levels]
            rows.append(
                [
                    name,
                    arm.label,
                    str(len(arm.logs)),
                    f"{min(curve)}-{max(curve)}",
                    _form(final_value(curve), digits),
                    "-" if best is None else f"{best[1]:.{digits}f} ({best[0]})",
                    _form(height, digits),
                    "-" if gap is None else f"{gap[1]:+.{digits}f} ({gap[0]})",
                    bands_separate(reference, curve) if i and reference else "-",
                    *("-" if name == LENGTH or step is None else str(step) for step in reached),
                ]
            )
    return heads, rows


def caveats(arms: Sequence[Arm]) -> list[str]:
    """Notes that a reader of these curves needs."""
    notes = [f"{name}: {COMPARABLE[name]}" for name in (REWARD, LENGTH) if any(a.curve(name) for a in arms)]
    if any(arm.curve(PASS_RATE) for arm in arms):
        notes.append(f"{PASS_RATE}: {COMPARABLE[PASS_RATE]}")
    plain = [arm.label for arm in arms if arm.kind == "verl" and not arm.curve(RESAMPLED)]
    if plain:
        notes.append(
            f"NOT COMPARABLE in reward: {', '.join(plain)} logs no resampling, so its reward is of all rollouts; compare it "
            f"with the dotted {PASS_RATE}, and its length with rollout/response_length_all"
        )
    singles = [arm.label for arm in arms if len(arm.logs) == 1]
    if singles and len(arms) > 1:
        notes.append(f"one seed only, so a difference may be chance: {', '.join(singles)}")
    if any(log.first_step == 0 for arm in arms for log in arm.logs):
        notes.append("logs whose steps begin at 0 are shifted by one")
    return notes


def render_text(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in (heads, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


# ------------------------------------------------------------------------------------------------- drawing


def draw_comparison(arms: Sequence[Arm]) -> Any:
    """A matplotlib figure: reward and response length side by side, bands over seeds, caveats below."""
    # Here: matplotlib takes a second, which tables do not need.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.6))
    FigureCanvasAgg(figure)
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS):
        for i, arm in enumerate(arms):
            curve = arm.curve(name)
            if not curve:
                continue
            steps = list(curve)
            colour = f"C{i % 10}"
            seeds = f" ({len(arm.logs)} seeds)" if len(arm.logs) > 1 else ""
            axes.plot(steps, [p.mean for p in curve.values()], color=colour, label=arm.label + seeds)
            if len(arm.logs) > 1:
                low, high = [p.low for p in curve.values()], [p.high for p in curve.values()]
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        if name == REWARD:
            _draw_pass_rates(axes, arms)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
        else:
            axes.text(0.5, 0.5, f"no log has {name}", ha="center", transform=axes.transAxes)
    notes = [line for note in caveats(arms) for line in textwrap.wrap(note, 190, subsequent_indent="   ")]
    figure.subplots_adjust(bottom=0.13 + 0.025 * len(notes), top=0.93, left=0.06, right=0.98)
    figure.text(0.02, 0.02, "\n".join(notes), fontsize=7, va="bottom")
    return figure


def _draw_pass_rates(axes: Any, arms: Sequence[Arm]) -> None:
    """Reward before rejection and resampling, dotted to tell it from the reward after."""
    for i, arm in enumerate(arms):
        curve = arm.curve(PASS_RATE)
        if curve:
            values = [point.mean for point in curve.values()]
            axes.plot(
                list(curve), values, ":", color=f"C{i % 10}", linewidth=1, label=f"{arm.label}: all rollouts"
            )


def write_comparison(
    arms: Sequence[Arm], messages: Sequence[str], levels: Sequence[float], out: Path
) -> list[Path]:
    """Write comparison.png, comparison.html (self-contained) and comparison.txt; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    figure = draw_comparison(arms)
    png, page, text = out / "comparison.png", out / "comparison.html", out / "comparison.txt"
    figure.savefig(png, dpi=120)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    heads, rows = comparison_table(arms, levels)
    notes = caveats(arms)
    lines = [render_text(heads, rows), "", *notes, *(f"warning: {message}" for message in messages)]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    page.write_text(_page(buffer.getvalue(), heads, rows, notes, messages), encoding="utf-8")
    return [png, page, text]


def _page(
    svg: bytes,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    messages: Sequence[str],
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    def items(lines: Sequence[str]) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"

    image = base64.b64encode(svg).decode()
    warnings = f"<h2>Files that could not be read in full</h2>{items(messages)}" if messages else ""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Training curves</title><style>"
        "body{font:14px system-ui,sans-serif;margin:2em;max-width:1200px}table{border-collapse:collapse}"
        "td,th{padding:.3em .7em;border-bottom:1px solid #ddd;text-align:left}img{width:100%}</style></head><body>"
        f"<h1>Training curves</h1><img alt='reward and response length' src='data:image/svg+xml;base64,{image}'>"
        f"<table>{cells('th', heads)}{''.join(cells('td', row) for row in rows)}</table>"
        f"<h2>What to know</h2>{items(notes)}{warnings}</body></html>\n"
    )


def _form(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
