"""The table at the end of a run: its first steps against its last, and held-out results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.text_table import aligned

SPAN = 5  # steps averaged at either end

# (metric, label, digits)
ROWS: tuple[tuple[str, str, int], ...] = (
    ("rollout/pass_rate", "pass rate (before rejection)", 3),
    ("rollout/reward_scores", "reward (after resampling)", 3),
    ("rollout/tool_error_ratio_positive", "tool errors per call, positives", 3),
    ("rollout/tool_error_ratio", "tool errors per call, all", 3),
    ("rollout/response_length", "response length (tokens)", 0),
    ("rollout/num_turns", "turns", 2),
    ("rollout/logprob_diff_mean", "log-prob difference, actor to engine", 8),
    ("rollout/tokens_per_second", "rollout tokens/s", 0),
    ("train/tokens_per_second", "train tokens/s", 0),
    ("time/step", "seconds a step", 2),
)
# keys of held_out.json; that of a recipe also has `after_stage`, a score by stage
HELD_OUT = (("before_sft", "before SFT"), ("after_sft", "after SFT"), ("before_rl", "before RL"), ("after_rl", "after RL"))

Table = list[tuple[str, str, str, str]]


# Ratios whose mean over steps is weighted by the number of calls, so that a step without calls has no weight.
WEIGHTS = {
    "rollout/tool_error_ratio": "rollout/tool_calls",
    "rollout/tool_error_ratio_positive": "rollout/tool_calls_positive",
    "rollout/tool_error_ratio_negative": "rollout/tool_calls_negative",
}


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean of a metric over the steps that have it; a ratio per call is weighted by calls."""
    weight = WEIGHTS.get(name)
    pairs = [(row[name], row.get(weight, 1) if weight else 1) for row in rows if row.get(name) is not None]
    total = sum(w for _, w in pairs)
    return sum(value * w for value, w in pairs) / total if total else None


def summary(directory: str | Path) -> Table:
    """(quantity, first steps, last steps, change) of a run. Raises ValueError when it has no metrics."""
    directory = Path(directory)
    rows = JsonlFile(directory / "metrics.jsonl").rows()
    if not rows:
        raise ValueError(f"{directory / 'metrics.jsonl'} has no steps")
    span = min(SPAN, len(rows))
    table: Table = []
    for name, label, digits in ROWS:
        first, last = mean_of(rows[:span], name), mean_of(rows[-span:], name)
        if first is None and last is None:
            continue
        change = "" if first is None or last is None else f"{last - first:+.{digits}f}"
        table.append((label, _form(first, digits), _form(last, digits), change))
    return table


def held_out(directory: str | Path) -> list[tuple[str, float]]:
    """(when, pass@1 on held-out problems) of each measurement."""
    path = Path(directory) / "held_out.json"
    if not path.is_file():
        return []
    measured = json.loads(path.read_text())
    scores = [(label, measured.get(key)) for key, label in HELD_OUT]
    scores += [(f"after {stage}", score) for stage, score in measured.get("after_stage", {}).items()]
    return [(label, score) for label, score in scores if score is not None]


def render_table(directory: str | Path) -> str:
    """The table as aligned text."""
    table, steps = summary(directory), len(JsonlFile(Path(directory) / "metrics.jsonl").rows())
    unit = "step" if min(SPAN, steps) == 1 else f"{min(SPAN, steps)} steps"
    heads = (f"{Path(directory).name}, {steps} steps", f"first {unit}", f"last {unit}", "change")
    return "\n".join([aligned([heads, *table]), *_footer(directory)])


def _footer(directory: str | Path) -> list[str]:
    lines = []
    stages = held_out(directory)
    if stages:
        lines.append("held-out pass@1: " + ", ".join(f"{label} {value:.3f}" for label, value in stages))
    path = Path(directory) / "held_out.json"
    seconds = json.loads(path.read_text()).get("seconds") if path.is_file() else None
    if seconds:
        lines.append(f"wall time: {seconds / 60:.1f} min")
    return lines


def _form(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
