"""The panels of one run: reward, length, tool errors, time, tool use and the signs of a collapse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.whole_file import replacement
from rstar2_megatron.report.table import held_out

# panel: (title, y label, y limits, [(metric, label)])
RunPanel = tuple[str, str, tuple[float, float] | None, tuple[tuple[str, str], ...]]
PANELS: tuple[RunPanel, ...] = (
    (
        "Reward",
        "mean reward",
        (0.0, 1.0),
        (
            ("rollout/pass_rate", "pass rate (all rollouts)"),
            ("rollout/reward_after_rejection", "after rejection"),
            ("rollout/reward_scores", "after resampling (trained on)"),
        ),
    ),
    (
        "Response length",
        "tokens, tool responses included",
        None,
        (("rollout/response_length_all", "all rollouts"), ("rollout/response_length", "after resampling")),
    ),
    (
        "Tool errors",
        "errors per call",
        None,
        (
            ("rollout/tool_error_ratio", "all"),
            ("rollout/tool_error_ratio_positive", "positives"),
            ("rollout/tool_error_ratio_negative", "negatives"),
        ),
    ),
    (
        "Time",
        "seconds",
        None,
        (
            ("time/step", "step"),
            ("time/rollout", "rollout"),
            ("time/training", "training"),
            ("time/sync_weights", "weight sync"),
        ),
    ),
    ("Tool use", "a trajectory", None, (("rollout/calls_per_trajectory", "calls"), ("rollout/num_turns", "turns"))),
    (
        "Signs of collapse",
        "share",
        (0.0, 1.0),
        (
            ("rollout/no_tool_ratio", "trajectories without a call"),
            ("rollout/distinct_call_ratio", "distinct calls of a trajectory"),
            ("rollout/void_turn_ratio", "void turns"),
            ("rollout/clip_ratio", "trajectories at the length limit"),
        ),
    ),
    (
        "Entropy",
        "nats a trained token",
        None,
        (("train/actor/entropy", "all"), ("train/actor/entropy_after_tool", "first tokens after a tool response")),
    ),
    (
        "Tokens of a probability below 1e-4",
        "share of generated tokens",
        None,
        (("rollout/improbable_token_ratio", "all rollouts"),),
    ),
)


SFT_PANELS: tuple[RunPanel, ...] = (
    ("Loss", "nats a trained token", None, (("train/sft/token_loss", "training"), ("eval/sft_loss", "validation"))),
    ("Learning rate", "", None, (("train/sft/lr", "learning rate"),)),
)

PREFERENCE_PANELS: tuple[RunPanel, ...] = (
    ("Loss", "nats a pair", None, (("train/preference/loss", "training"), ("eval/preference_loss", "validation"))),
    (
        "Pairs in the right order",
        "",
        (0.0, 1.0),
        (("train/preference/accuracy", "training"), ("eval/preference_accuracy", "validation")),
    ),
)


def draw_run(directory: str | Path, out: str | Path | None = None, panels: Sequence[RunPanel] = PANELS) -> Path:
    """Write `curves.png` of a run from its metrics.jsonl, with the borders of stages.json if the file exists.

    panels: two a row. Raises ValueError when it has no steps.
    """
    directory = Path(directory)
    rows = JsonlFile(directory / "metrics.jsonl").rows()
    if not rows:
        raise ValueError(f"{directory / 'metrics.jsonl'} has no steps to draw")
    target = Path(out) if out is not None else directory / "curves.png"
    heading = directory.resolve().name
    if stages := held_out(directory):
        heading += "   held-out pass@1: " + ", ".join(f"{label} {value:.2f}" for label, value in stages)
    borders = stage_borders(directory)

    from matplotlib.figure import Figure  # here: matplotlib takes a second, which tables do not need

    figure = Figure(figsize=(11, 3.5 * (len(panels) // 2)), layout="constrained")
    for axes, (title, unit, limits, lines) in zip(figure.subplots(len(panels) // 2, 2).flat, panels):
        for name, label in lines:
            steps, values = points(rows, name)
            if steps:
                axes.plot(steps, values, label=label, marker="." if len(steps) < 30 else None, linewidth=1.5)
        for first, name in borders:
            axes.axvline(first - 0.5, color="grey", linewidth=0.8, linestyle="--")
            axes.annotate(name, (first - 0.5, 1.0), xycoords=("data", "axes fraction"), fontsize=7, va="top")
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        axes.set_ylim(*(limits or (0, None)))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(heading, fontsize=11)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacement(target) as partial:
        figure.savefig(partial, dpi=120, format="png")
    return target


def stage_borders(directory: Path) -> list[tuple[int, str]]:
    """(first step, name) of each stage of a recipe's metrics.jsonl; empty for a single run."""
    path = directory / "stages.json"
    if not path.is_file():
        return []
    return [(int(stage["first_step"]), str(stage["name"])) for stage in json.loads(path.read_text())]


def points(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """(steps, values) of a metric. Steps without it are left out."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]
