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


def render_table(directory: str | Path) -> str:
    """The table of a run as aligned text. Raises ValueError when it has no metrics."""
    directory = Path(directory)
    rows = JsonlFile(directory / "metrics.jsonl").rows()
    if not rows:
        raise ValueError(f"{directory / 'metrics.jsonl'} has no steps")
    span = min(SPAN, len(rows))
    unit = "step" if span == 1 else f"{span} steps"
    table = [(f"{directory.name}, {len(rows)} steps", f"first {unit}", f"last {unit}", "change")]
    for name, label, digits in ROWS:
        first, last = mean_of(rows[:span], name), mean_of(rows[-span:], name)
        if first is None and last is None:
            continue
        change = "" if first is None or last is None else f"{last - first:+.{digits}f}"
        table.append((label, _form(first, digits), _form(last, digits), change))
    lines = [aligned(table)]
    if stages := held_out(directory):
        lines.append("held-out pass@1: " + ", ".join(f"{label} {value:.3f}" for label, value in stages))
    if seconds := _measured(directory).get("seconds"):
        lines.append(f"wall time: {seconds / 60:.1f} min")
    return "\n".join(lines)


def held_out(directory: str | Path) -> list[tuple[str, float]]:
    """(when, pass@1 on held-out problems) of each measurement."""
    measured = _measured(directory)
    scores = [(label, measured.get(key)) for key, label in HELD_OUT]
    scores += [(f"after {stage}", score) for stage, score in measured.get("after_stage", {}).items()]
    return [(label, score) for label, score in scores if score is not None]


def _measured(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / "held_out.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _form(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
