"""Figures of a step from its groups; the line a person reads; metrics.jsonl. Pure: no Ray, no torch.

Names are RLinf's where RLinf has them (docs/metrics.md maps them to verl's). `rollout/pass_rate` counts every
finished trajectory before rejection; `rollout/reward_scores` and the lengths under RLinf's names are after
rejection and resampling, as RLinf logs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar2_megatron.algorithm.roc import ResampleResult
from rstar2_megatron.trajectory import FinishReason, Group, Trajectory

Metrics = dict[str, float]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def tool_error_ratio(trajectories: Iterable[Trajectory]) -> float:
    """Tool calls that failed by the model's fault over all its tool calls; 0.0 without calls."""
    calls = errors = 0
    for trajectory in trajectories:
        calls += len(trajectory.tool_calls)
        errors += trajectory.num_tool_errors
    return errors / calls if calls else 0.0


def rollout_metrics(groups: Sequence[Group], resampled: Sequence[ResampleResult]) -> Metrics:
    """Figures of one rollout phase and of what resampling kept of it."""
    finished = [t for g in groups for t in g.usable]
    dropped = sum(len(g.trajectories) - len(g.usable) for g in groups)
    kept = [t for result in resampled for t in result.kept]
    positives = [t for t in finished if t.reward]
    negatives = [t for t in finished if not t.reward]
    kept_groups = [r for r in resampled if not r.rejected]
    lengths = [len(t.response_ids) for t in kept]
    metrics: Metrics = {
        "rollout/pass_rate": _mean(t.reward or 0.0 for t in finished),
        "rollout/reward_scores": _mean(t.reward or 0.0 for t in kept),
        "rollout/response_length": _mean(lengths),
        "rollout/max_of_response_length": float(max(lengths, default=0)),
        "rollout/min_of_response_length": float(min(lengths, default=0)),
        "rollout/response_length_before_roc": _mean(len(t.response_ids) for t in finished),
        "rollout/generated_length_before_roc": _mean(t.num_trained_tokens for t in finished),
        "rollout/prompt_length": _mean(len(t.prompt_ids) for t in kept),
        "rollout/total_num_sequence": float(len(kept)),
        "rollout/num_trajectories": float(len(finished)),
        "rollout/dropped_infrastructure": float(dropped),
        "rollout/num_turns": _mean(t.num_turns for t in finished),
        "rollout/tool_calls_per_trajectory": _mean(len(t.tool_calls) for t in finished),
        "rollout/no_tool_ratio": _mean(float(not t.tool_calls) for t in finished),
        "rollout/tool_error_ratio": tool_error_ratio(finished),
        "rollout/tool_error_ratio_positive": tool_error_ratio(positives),
        "rollout/tool_error_ratio_negative": tool_error_ratio(negatives),
        "rollout/tool_error_ratio_kept_positive": tool_error_ratio(t for t in kept if t.reward),
        "rollout/groups": float(len(groups)),
        "rollout/groups_kept": float(len(kept_groups)),
        "rollout/groups_rejected": float(len(resampled) - len(kept_groups)),
        "rollout/groups_all_correct": float(sum(_all_equal(g, 1.0) for g in groups)),
        "rollout/groups_all_wrong": float(sum(_all_equal(g, 0.0) for g in groups)),
        "rollout/answers_per_trajectory": _mean(_answers(t) for t in finished),
        "rollout/no_answer_ratio": _mean(float(_answers(t) == 0) for t in finished),
        "rollout/trajectory_seconds": _mean(t.seconds for t in finished),
    }
    for reason in FinishReason:
        of_all = [t for g in groups for t in g.trajectories]
        metrics[f"rollout/finish/{reason.value}"] = _mean(float(t.finish_reason is reason) for t in of_all)
    return metrics


def _all_equal(group: Group, reward: float) -> bool:
    rewards = group.rewards
    return bool(rewards) and all(r == reward for r in rewards)


def _answers(trajectory: Trajectory) -> int:
    return sum(text.count("</answer>") for text in trajectory.assistant_texts)


def step_metrics(
    groups: Sequence[Group],
    resampled: Sequence[ResampleResult],
    actor: Metrics,
    stats: Metrics,
    seconds: Metrics,
) -> Metrics:
    """One row of metrics.jsonl but for `step`.

    `actor` are the actor's figures ("actor/policy_loss", ...), `stats` the engines' ("generated_tokens", ...),
    `seconds` the parts of the step ("rollout", "training", "step", ...).
    """
    metrics = rollout_metrics(groups, resampled)
    metrics["rollout/logprob_diff_mean"] = actor.get("actor/logprob_diff_mean", 0.0)
    metrics["rollout/logprob_diff_max"] = actor.get("actor/logprob_diff_max", 0.0)
    metrics.update({f"train/{name}": value for name, value in actor.items()})
    metrics.update({f"engine/{name}": value for name, value in stats.items()})
    metrics.update({f"time/{name}": value for name, value in seconds.items()})
    generated = sum(t.num_trained_tokens for g in groups for t in g.trajectories)
    metrics["rollout/tokens_per_second"] = generated / max(seconds.get("rollout", 0.0), 1e-9)
    trained = actor.get("actor/total_tokens", 0.0)
    metrics["train/tokens_per_second"] = trained / max(seconds.get("training", 0.0), 1e-9)
    return metrics


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    text: Any  # Metrics -> str


_COLUMNS = (
    _Column("step", 5, lambda m: f"{m['step']:.0f}"),
    _Column("pass", 6, lambda m: f"{m['rollout/pass_rate']:.3f}"),
    _Column("reward", 7, lambda m: f"{m['rollout/reward_scores']:.3f}"),
    _Column("kept/rej", 9, lambda m: f"{m['rollout/groups_kept']:.0f}/{m['rollout/groups_rejected']:.0f}"),
    _Column("toolerr+", 9, lambda m: f"{m['rollout/tool_error_ratio_positive']:.3f}"),
    _Column("len", 7, lambda m: f"{m['rollout/response_length']:.0f}"),
    _Column("turns", 6, lambda m: f"{m['rollout/num_turns']:.2f}"),
    _Column("roll tok/s", 11, lambda m: f"{m['rollout/tokens_per_second']:.0f}"),
    _Column("train tok/s", 12, lambda m: f"{m['train/tokens_per_second']:.0f}"),
    _Column("s/step", 7, lambda m: f"{m['time/step']:.1f}"),
    _Column("= roll", 7, lambda m: f"{m.get('time/rollout', 0):.1f}"),
    _Column("train", 6, lambda m: f"{m.get('time/training', 0):.1f}"),
    _Column("sync", 5, lambda m: f"{m.get('time/sync_weights', 0):.1f}"),
    _Column("|dlogp|", 9, lambda m: f"{m['rollout/logprob_diff_mean']:.1e}"),
)


def header_line() -> str:
    """Titles of `step_line`."""
    return "".join(c.title.rjust(c.width) for c in _COLUMNS)


def step_line(metrics: Metrics) -> str:
    """One aligned line: pass rate before RoC, reward after, groups kept/rejected, tool errors of positives, ..."""
    return "".join(c.text(metrics).rjust(c.width) for c in _COLUMNS)


class MetricsFile:
    """metrics.jsonl: one object a step, on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, row: Metrics) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def truncate_after(self, step: int) -> None:
        """Drop rows of steps after `step`, which a resumed run does again, and a line that a kill cut short."""
        rows = [row for row in self.read() if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        partial = self.path.with_suffix(".unfinished")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path)

    def read(self) -> list[Metrics]:
        """All complete rows; a last line cut short is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows
