"""Metrics of a step under their names, and the aligned line on the terminal. Pure.

Names are RLinf's where RLinf has the quantity (`rollout/reward_scores`, `train/actor/policy_loss`,
`time/step`); `report/names.py` maps them to verl's. Steps count finished updates from 1.

Reward and length are measured at three places, because public curves differ in which one they show:

- of every usable trajectory: `rollout/pass_rate`, `rollout/response_length_all`;
- after groups of equal reward are rejected: `rollout/reward_after_rejection`,
  `rollout/response_length_after_rejection`;
- after resample-on-correct, as trained on (RLinf's curves): `rollout/reward_scores`,
  `rollout/response_length`.

A mean over nothing is left out of the step's metrics; a count or ratio of events that did not occur is 0.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rstar2_megatron.algorithm.filters import num_distinct, num_void_turns
from rstar2_megatron.algorithm.roc import Rejection, ResampleResult
from rstar2_megatron.records.step_shares import SHARES, step_shares
from rstar2_megatron.trajectory import FinishReason, Group, ToolOutcome, Trajectory

Metrics = dict[str, float]
DIFFERENCE = "rollout/logprob_diff_mean"
RECENT = 5  # steps, of `logprob_drift`


def step_metrics(
    groups: Sequence[Group],
    resampled: Sequence[ResampleResult],
    actor_metrics: Mapping[str, float],
    rollout_stats: Mapping[str, float],
    seconds: Mapping[str, float],
) -> Metrics:
    """All metrics of one step, without its number.

    actor_metrics: named `actor/...`, written as `train/actor/...`.
    rollout_stats: counters of the engines and the judge client, written as `rollout/engine/...`.
    seconds: at least `step`, `rollout` and `training`, written as `time/...`.
    """
    metrics = rollout_metrics(groups, resampled)
    metrics.update({f"train/{name}": float(value) for name, value in actor_metrics.items()})
    metrics.update({f"rollout/engine/{name}": float(value) for name, value in rollout_stats.items()})
    metrics.update({f"time/{name}": float(value) for name, value in seconds.items()})
    waits = (rollout_stats.get(f"{part}_seconds", 0.0) for part in ("tail", "grading"))
    metrics.update({f"share/{name}": value for name, value in step_shares(seconds, *waits).items()})
    for which in ("mean", "max"):
        if f"actor/logprob_diff_{which}" in actor_metrics:
            metrics[f"rollout/logprob_diff_{which}"] = float(actor_metrics[f"actor/logprob_diff_{which}"])
    overlapped = "trainer_idle_seconds" in rollout_stats  # engines generate in the whole step
    if generating := seconds.get("step" if overlapped else "rollout"):
        metrics["rollout/tokens_per_second"] = metrics["rollout/generated_tokens"] / generating
    if seconds.get("training"):
        packed = sum(t.length for result in resampled for t in result.kept)
        metrics["train/tokens_per_second"] = packed / seconds["training"]
    return metrics


def staleness_metrics(kept: Sequence[Trajectory], version: int, bound: int) -> Metrics:
    """Weight versions between the trained tokens of `kept` and the weights `version` that they train.

    `staleness_share/{n}` is the share of tokens that are n versions old.
    """
    tokens: Counter[int] = Counter()
    for trajectory in kept:
        for span in trajectory.version_spans:
            tokens[version - span.version] += span.end - span.start
    total = tokens.total()
    metrics = {f"staleness_share/{n}": _ratio(tokens[n], total) for n in range(bound + 1)}
    metrics["staleness_mean"] = _ratio(sum(n * count for n, count in tokens.items()), total)
    metrics["staleness_max"] = max(tokens, default=0)
    return metrics


def logprob_drift(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Whether the log-probs of engine and actor drift apart in the course of a run.

    Mean difference of the last `RECENT` steps over the median of all steps before; None in the first 2 x `RECENT` steps.
    rows: metrics of every step so far, with DIFFERENCE; steps without it are passed over.
    """
    values = [float(row[DIFFERENCE]) for row in rows if row.get(DIFFERENCE) is not None]
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2 * RECENT:
        return None
    before = statistics.median(values[:-RECENT])
    return statistics.fmean(values[-RECENT:]) / before if before > 0 else None


def rollout_metrics(groups: Sequence[Group], resampled: Sequence[ResampleResult]) -> Metrics:
    """Metrics of graded groups and of their resampling results. Raises ValueError when the numbers differ."""
    every = [t for group in groups for t in group.trajectories]
    usable = [t for group in groups for t in group.usable]
    survived = [t for group, result in zip(groups, resampled, strict=True) if not result.rejected for t in group.usable]
    kept = [t for result in resampled for t in result.kept]

    metrics: Metrics = {}
    _put_mean(metrics, "rollout/pass_rate", [float(t.is_positive) for t in usable if t.reward is not None])
    _put_mean(metrics, "rollout/reward_after_rejection", _rewards(survived))
    _put_mean(metrics, "rollout/reward_scores", _rewards(kept))
    _put_mean(metrics, "rollout/response_length_all", [t.response_tokens for t in usable])
    _put_mean(metrics, "rollout/response_length_after_rejection", [t.response_tokens for t in survived])
    _put_spread(metrics, "response_length", [t.response_tokens for t in kept])
    _put_mean(metrics, "rollout/prompt_length", [t.prompt_tokens for t in kept])

    logprobs = [t.logprob_sum for t in usable]  # 0.0 at tokens that were not generated
    generated = sum(t.num_trained_tokens for t in usable)
    if generated:
        metrics["rollout/logprob_mean"] = sum(logprobs) / generated
        metrics["rollout/logprob_min"] = min(t.logprob_min for t in usable)
        metrics["rollout/improbable_token_ratio"] = sum(t.num_improbable for t in usable) / generated

    metrics["rollout/num_trajectories"] = len(every)
    metrics["rollout/total_num_sequence"] = len(kept)
    reasons = Counter(t.finish_reason for t in every if not t.usable)
    metrics["rollout/dropped_cut"] = reasons.pop(FinishReason.CUT, 0)
    metrics["rollout/dropped_infrastructure"] = reasons.total()
    metrics["rollout/generated_tokens"] = sum(t.num_trained_tokens for t in every)
    metrics.update(_group_metrics(groups, resampled))
    for name in dict.fromkeys(name for result in resampled for name in result.filtered):
        metrics[f"rollout/filtered/{name}"] = sum(result.filtered[name] for result in resampled)
    metrics.update(_ending_metrics(every, usable))
    metrics.update(_tool_metrics(usable))
    metrics.update(_time_metrics(usable))
    metrics.update(_format_metrics(resampled))
    for name in sorted({name for t in usable for name in t.reward_terms}):
        _put_mean(metrics, f"rollout/reward/{name}", [t.reward_terms[name] for t in usable if name in t.reward_terms])
    for kind, count in sorted(Counter(t.user_error for t in every if t.user_error).items()):
        metrics[f"rollout/user_code_errors/{kind}"] = count
    for kind, count in sorted(Counter(_kind(t.grade_detail or "ungraded") for t in usable).items()):
        metrics[f"rollout/grade/{kind}"] = count
    return metrics


def _kind(detail: str) -> str:
    """A judge's reason is a sentence, of which each would be a metric of its own."""
    return detail if detail.isidentifier() and len(detail) <= 40 else "other"


def _group_metrics(groups: Sequence[Group], resampled: Sequence[ResampleResult]) -> Metrics:
    reasons = Counter(result.reason for result in resampled if result.rejected)
    pass_rates = [sum(t.is_positive for t in group.usable) / len(group.usable) for group in groups if group.usable]
    return {
        "rollout/groups": len(groups),
        "rollout/groups_kept": len(groups) - sum(reasons.values()),
        "rollout/groups_rejected": sum(reasons.values()),
        "rollout/groups_rejected_ratio": _ratio(sum(reasons.values()), len(groups)),
        "rollout/groups_rejected_all_correct": reasons[Rejection.ALL_CORRECT],
        "rollout/groups_rejected_all_wrong": reasons[Rejection.ALL_WRONG],
        "rollout/groups_rejected_too_few": reasons[Rejection.TOO_FEW],
        "rollout/groups_never_solved": sum(rate <= 0 for rate in pass_rates),
        "rollout/groups_always_solved": sum(rate >= 1 for rate in pass_rates),
    }


def _ending_metrics(every: Sequence[Trajectory], usable: Sequence[Trajectory]) -> Metrics:
    endings = Counter(t.finish_reason for t in every)
    metrics: Metrics = {f"rollout/finish/{reason.value}": endings[reason] for reason in FinishReason}
    metrics["rollout/finish/none"] = endings[None]
    clipped = sum(t.finish_reason is FinishReason.LENGTH_LIMIT for t in usable)
    answered = sum(t.finish_reason is FinishReason.ANSWERED for t in usable)
    metrics["rollout/clip_ratio"] = _ratio(clipped, len(usable))
    metrics["rollout/fraction_of_samples_properly_ended"] = _ratio(answered, len(usable))
    _put_spread(metrics, "num_turns", [t.num_turns for t in usable])
    return metrics


def _time_metrics(usable: Sequence[Trajectory]) -> Metrics:
    """Seconds of a trajectory, in all, in its tool calls, and outside them (generation and waiting for it)."""
    tools = [sum(call.seconds for call in t.tool_calls) for t in usable]
    others = [max(t.seconds - in_tools, 0.0) for t, in_tools in zip(usable, tools)]
    metrics: Metrics = {}
    _put_mean(metrics, "rollout/trajectory_seconds", [t.seconds for t in usable])
    _put_spread(metrics, "tool_seconds_per_trajectory", tools)
    _put_spread(metrics, "generate_seconds_per_trajectory", others)
    return metrics


def _tool_metrics(usable: Sequence[Trajectory]) -> Metrics:
    """Errors per call over all trajectories, over positives (as in the paper's Fig. 4) and over negatives."""
    positive = [t for t in usable if t.is_positive]
    negative = [t for t in usable if not t.is_positive]
    metrics: Metrics = {}
    for suffix, trajectories in (("", usable), ("_positive", positive), ("_negative", negative)):
        calls = [call for t in trajectories for call in t.tool_calls if call.outcome is not ToolOutcome.INFRASTRUCTURE]
        errors = sum(call.outcome.is_model_error for call in calls)
        _put_ratio(metrics, f"rollout/tool_error_ratio{suffix}", errors, len(calls))
        metrics[f"rollout/tool_calls{suffix}"] = len(calls)
        without = sum(not t.tool_calls for t in trajectories)
        _put_ratio(metrics, f"rollout/no_tool_ratio{suffix}", without, len(trajectories))
    every = [call for t in usable for call in t.tool_calls]
    _put_mean(metrics, "rollout/calls_per_trajectory", [len(t.tool_calls) for t in usable])
    runnable = [[c for c in t.tool_calls if c.outcome is not ToolOutcome.MALFORMED] for t in usable]
    _put_ratio(metrics, "rollout/distinct_call_ratio", sum(map(num_distinct, runnable)), sum(map(len, runnable)))
    _put_ratio(metrics, "rollout/void_turn_ratio", sum(map(num_void_turns, usable)), sum(t.num_turns for t in usable))
    outcomes = Counter(call.outcome for call in every)
    metrics.update({f"rollout/tool_outcome/{o.value}": outcomes[o] for o in ToolOutcome})
    _put_mean(metrics, "rollout/tool_seconds", [call.seconds for call in every])
    if every:
        metrics["rollout/max_of_tool_seconds"] = max(call.seconds for call in every)
    return metrics


def _format_metrics(resampled: Sequence[ResampleResult]) -> Metrics:
    """Penalties and answer tags as resampling measured them, over every usable trajectory."""
    penalties = [p for result in resampled for p in result.penalties]
    if not penalties:
        return {}
    metrics: Metrics = {}
    _put_mean(metrics, "rollout/penalty_error", [p.error for p in penalties])
    _put_mean(metrics, "rollout/penalty_format", [p.answer_format for p in penalties])
    _put_mean(metrics, "rollout/answers_per_trajectory", [p.num_answers for p in penalties])
    metrics["rollout/answers_zero"] = sum(p.num_answers == 0 for p in penalties)
    metrics["rollout/answers_one"] = sum(p.num_answers == 1 for p in penalties)
    metrics["rollout/answers_many"] = sum(p.num_answers > 1 for p in penalties)
    kept = [result.penalties[i] for result in resampled if result.penalties for i in result.indices]
    _put_mean(metrics, "rollout/penalty_error_kept", [p.error for p in kept])
    _put_mean(metrics, "rollout/penalty_format_kept", [p.answer_format for p in kept])
    return metrics


def _rewards(trajectories: Iterable[Trajectory]) -> list[float]:
    return [t.reward for t in trajectories if t.reward is not None]


def _put_mean(metrics: Metrics, name: str, values: Sequence[float]) -> None:
    if values:
        metrics[name] = sum(values) / len(values)


def _put_spread(metrics: Metrics, name: str, values: Sequence[float]) -> None:
    _put_mean(metrics, f"rollout/{name}", values)
    if values:
        metrics[f"rollout/max_of_{name}"] = max(values)
        metrics[f"rollout/min_of_{name}"] = min(values)


def _put_ratio(metrics: Metrics, name: str, part: float, whole: float) -> None:
    """Nothing where nothing was counted: a step without calls has no errors, and is none without errors either."""
    if whole:
        metrics[name] = part / whole


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ---------------------------------------------------------------------------------------- terminal line


_RESTARTED = (("engine", "engine/engine_restarts"), ("worker", "engine/worker_restarts"), ("judge", "judge_restarts"))
HEADER_LINE = (
    "  step   pass  reward  kept/rej  tool err  length  turns  roll tok/s  train tok/s"
    "   step s = roll + tail + grade + train + sync + ckpt + other %   |dlogp|"
)
"""Column names of `step_line`.

pass: before rejection; reward: after resampling; tool err: per call among positives; tok/s: generated, and packed for
training; then the seconds of the step, and of what they are made in percent (`share/...`); |dlogp|: mean difference of
log-probs between actor and engine.
"""


def step_line(metrics: Mapping[str, Any]) -> str:
    """One aligned line; quantities that are absent or not finite show as `-`."""

    def number(name: str, width: int, form: str) -> str:
        value = metrics.get(name)
        if value is None or not math.isfinite(value):
            return f"{'-':>{width}}"
        return f"{value:>{width}{form}}"

    widths = (4, 4, 5, 5, 4, 4, 7)  # of the header's words
    shares = " + ".join(f"{100 * (metrics.get(f'share/{name}') or 0.0):>{width}.0f}" for name, width in zip(SHARES, widths))
    kept, rejected = metrics.get("rollout/groups_kept", 0), metrics.get("rollout/groups_rejected", 0)
    return (
        f"{metrics['step']:>6.0f}  {number('rollout/pass_rate', 5, '.3f')}"
        f"   {number('rollout/reward_scores', 5, '.3f')}  {f'{kept:.0f}/{rejected:.0f}':>8}"
        f"  {number('rollout/tool_error_ratio_positive', 8, '.3f')}"
        f"  {number('rollout/response_length', 6, '.0f')}  {number('rollout/num_turns', 5, '.2f')}"
        f"  {number('rollout/tokens_per_second', 10, '.0f')}"
        f"  {number('train/tokens_per_second', 11, '.0f')}"
        f"  {metrics.get('time/step') or 0.0:>7.1f} = {shares}"
        f"  {number('rollout/logprob_diff_mean', 8, '.1e')}{_restarts(metrics)}"
    )


def _restarts(metrics: Mapping[str, Any]) -> str:
    """What the run has started again so far; "" while nothing had to be."""
    counts = ((what, metrics.get(f"rollout/{name}") or 0) for what, name in _RESTARTED)
    shown = ", ".join(f"{what} {count:.0f}" for what, count in counts if count)
    return f"  restarts so far: {shown}" if shown else ""
