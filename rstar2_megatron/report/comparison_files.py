"""Draws a comparison and writes comparison.png, comparison.html (self-contained) and comparison.txt."""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.report.arms import CLOCKS, Arm, clock
from rstar2_megatron.report.compare import RunComparison
from rstar2_megatron.report.names import Panel

_NOTES_IN_FIGURE = 24  # lines; the text file holds all
_LEGEND_COLUMNS = 3


def draw_comparison(comparison: RunComparison) -> Any:
    """A matplotlib figure: a panel a metric, raw and smoothed means, bands over seeds; conclusions and notes below."""
    # Here: matplotlib takes a second, which tables do not need.
    from matplotlib.figure import Figure

    arms, panels = comparison.arms, comparison.panels
    notes = [*(f"warning: {fault}" for fault in comparison.faults), *comparison.conclusions, *comparison.caveats]
    lines = [line for note in notes for line in textwrap.wrap(note, 190, subsequent_indent="   ")]
    if len(lines) > _NOTES_IN_FIGURE:
        rest = len(lines) - _NOTES_IN_FIGURE
        lines = [*lines[:_NOTES_IN_FIGURE], f"... and {rest} more lines in comparison.txt"]
    rows, columns = (len(panels) + 1) // 2, min(len(panels), 2)
    notes_height = 0.5 + 0.14 * len(lines)
    legend_height = 0.2 + 0.25 * -(-len(arms) // _LEGEND_COLUMNS)
    height = 4.2 * rows + notes_height + legend_height
    figure = Figure(figsize=(12, height))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    shown: dict[str, Any] = {}  # for one legend above: in each panel it would hide the curves
    for axes, panel in zip(grid.flat, panels):
        for i, arm in enumerate(arms):
            _draw_arm(axes, arm, panel, comparison, f"C{i % 10}")
        axes.set_title(panel.title)
        axes.set_xlabel(CLOCKS[comparison.x])
        axes.set_ylabel(panel.unit)
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        shown = dict(zip(labels, handles)) | shown
        if not handles:
            axes.text(0.5, 0.5, f"no log has {panel.metric}", ha="center", transform=axes.transAxes)
    top = 1 - (legend_height + 0.4) / height
    figure.subplots_adjust(bottom=(notes_height + 0.5) / height, top=top, left=0.07, right=0.98, hspace=0.32)
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="upper center", ncols=_LEGEND_COLUMNS, fontsize=8, frameon=False)
    figure.text(0.02, 0.15 / height, "\n".join(lines), fontsize=7, va="bottom")
    return figure


def _draw_arm(axes: Any, arm: Arm, panel: Panel, comparison: RunComparison, colour: str) -> None:
    spent = arm.clock(comparison.x)
    for log in arm.logs:  # a point that is no number is shown, not skipped
        steps = [step + 1 - log.first_step for step in sorted(log.not_finite.get(panel.metric, ()))]
        own = clock(log, comparison.x)
        places = [own[step] for step in steps if step in own]
        axes.plot(places, [0.02] * len(places), "x", color=colour, transform=axes.get_xaxis_transform())
    raw, smooth = arm.curve(panel.metric), arm.curve(panel.metric, comparison.last)
    steps = [step for step in raw if step in spent]
    if not steps:
        return
    xs = [spent[step] for step in steps]
    seeds = f" ({len(arm.logs)} seeds, mean +- 1 standard deviation)" if len(arm.logs) > 1 else " (1 run)"
    marker = "." if len(steps) < 30 else None
    axes.plot(xs, [raw[s].mean for s in steps], color=colour, alpha=0.3, linewidth=0.8, marker=marker)
    axes.plot(xs, [smooth[s].mean for s in steps], color=colour, linewidth=1.8, label=arm.label + seeds)
    if len(arm.logs) > 1:
        low, high = ([smooth[s].mean + side * smooth[s].deviation for s in steps] for side in (-1, 1))
        axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def write_comparison(comparison: RunComparison, out: Path) -> list[Path]:
    """Write the three files; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    figure = draw_comparison(comparison)
    png, page, text = out / "comparison.png", out / "comparison.html", out / "comparison.txt"
    figure.savefig(png, dpi=120)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    text.write_text(comparison.text + "".join(f"warning: {fault}\n" for fault in comparison.faults), encoding="utf-8")
    page.write_text(_page(buffer.getvalue(), comparison), encoding="utf-8")
    return [png, page, text]


def _page(svg: bytes, comparison: RunComparison) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    def items(title: str, lines: Sequence[str]) -> str:
        body = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        return f"<h2>{title}</h2><ul>{body}</ul>" if lines else ""

    image = base64.b64encode(svg).decode()
    heads, rows = comparison.table
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Training curves</title><style>"
        "body{font:14px system-ui,sans-serif;margin:2em;max-width:1200px}table{border-collapse:collapse}"
        "td,th{padding:.3em .7em;border-bottom:1px solid #ddd;text-align:left}img{width:100%}</style></head><body>"
        f"<h1>Training curves</h1><img alt='curves of the arms' src='data:image/svg+xml;base64,{image}'>"
        f"<table>{cells('th', heads)}{''.join(cells('td', row) for row in rows)}</table>"
        f"{items('What may be concluded', comparison.conclusions)}"
        f"{items('What to know', comparison.caveats)}"
        f"{items('What is wrong with the logs', comparison.faults)}</body></html>\n"
    )
