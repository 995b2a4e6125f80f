"""Names of the same quantity in our metrics (RLinf's names), in RLinf's own logs and in verl's, and how it is drawn.

`COMPARABLE` notes how the quantity differs between the codes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# ours: (verl's names, best first)
TO_VERL: dict[str, tuple[str, ...]] = {
    "rollout/reward_scores": ("critic/rewards/mean", "critic/score/mean"),
    "rollout/response_length": ("response_length/mean",),
    "rollout/max_of_response_length": ("response_length/max",),
    "rollout/min_of_response_length": ("response_length/min",),
    "rollout/clip_ratio": ("response_length/clip_ratio",),
    "rollout/prompt_length": ("prompt_length/mean",),
    "rollout/num_trajectories": ("down_sampling/before_sampling_trace_num",),
    "rollout/total_num_sequence": ("down_sampling/after_sampling_trace_num",),
    "rollout/groups_never_solved": ("reject_equal_reward/solve_equal_zeros",),
    "rollout/groups_always_solved": ("reject_equal_reward/solve_equal_non_all_zeros",),
    "rollout/tool_error_ratio": ("roc_error_ratio/global_err_ratio",),
    "rollout/penalty_error": ("roc_error_ratio/penalty_weight",),
    "rollout/answers_per_trajectory": ("roc_answer_format/answer_per_rollout_mean",),
    "rollout/answers_zero": ("roc_answer_format/zero_answer_count",),
    "rollout/answers_one": ("roc_answer_format/one_answer_count",),
    "rollout/answers_many": ("roc_answer_format/gt_one_answer_count",),
    "rollout/num_turns": ("num_turns/mean",),
    "rollout/max_of_num_turns": ("num_turns/max",),
    "rollout/min_of_num_turns": ("num_turns/min",),
    "rollout/tool_seconds_per_trajectory": ("timing_s/agent_loop/tool_calls/mean",),
    "rollout/max_of_tool_seconds_per_trajectory": ("timing_s/agent_loop/tool_calls/max",),
    "rollout/min_of_tool_seconds_per_trajectory": ("timing_s/agent_loop/tool_calls/min",),
    "rollout/generate_seconds_per_trajectory": ("timing_s/agent_loop/generate_sequences/mean",),
    "rollout/max_of_generate_seconds_per_trajectory": ("timing_s/agent_loop/generate_sequences/max",),
    "rollout/min_of_generate_seconds_per_trajectory": ("timing_s/agent_loop/generate_sequences/min",),
    "rollout/groups_rejected_ratio": ("reject_equal_reward/solve_equal_total_ratio",),
    "train/actor/policy_loss": ("actor/pg_loss",),
    "train/actor/clip_fraction": ("actor/pg_clipfrac",),
    "train/actor/dual_clip_fraction": ("actor/pg_clipfrac_lower",),
    "train/actor/approx_kl": ("actor/ppo_kl",),
    "train/actor/grad_norm": ("actor/grad_norm",),
    "train/actor/lr": ("actor/lr",),
    "train/actor/entropy": ("actor/entropy", "actor/entropy_loss"),
    "train/actor/rollout_kl": ("rollout_corr/k3_kl",),
    "train/actor/tis_ratio": ("rollout_corr/rollout_is_mean",),
    "train/actor/tis_ratio_max": ("rollout_corr/rollout_is_max",),
    "train/actor/tis_clip_fraction": ("rollout_corr/rollout_is_ratio_fraction_high",),
    "time/step": ("timing_s/step",),
    "time/rollout": ("timing_s/gen",),
    "time/training": ("timing_s/update_actor",),
    "time/resample": ("timing_s/down_sample",),
}

# verl: val-core/{data source}/{reward or acc}/{mean, best, maj}@{k}...; ours: eval/{task}/{average, pass@k, majority@k}
_VALIDATION = re.compile(r"val-(?:core|aux)/(?P<source>.+)/(?:reward|acc|score)/(?P<what>mean|best|maj)@(?P<k>\d+)(?:/mean)?")

HELD_OUT = "held-out"
"""verl's data source of all held-out problems together, in an exported comparison."""

_FROM_VERL = {theirs: ours for ours, names in TO_VERL.items() for theirs in names}

REWARD = "rollout/reward_scores"
LENGTH = "rollout/response_length"
PASS_RATE = "rollout/pass_rate"
LENGTH_ALL = "rollout/response_length_all"
RESAMPLED = "rollout/total_num_sequence"  # logged by every code that resamples
DRAWN = "rollout/num_trajectories"
GENERATED = "rollout/generated_tokens"
SECONDS = "time/step"


@dataclass(frozen=True, slots=True)
class Panel:
    """How a metric is drawn: title, label of the y axis, decimals in tables."""

    metric: str
    title: str
    unit: str
    digits: int = 3


# the words of --metrics; any other name of metrics.jsonl is a panel of its own
PANELS: dict[str, Panel] = {
    "pass-rate": Panel(PASS_RATE, "Pass rate (all rollouts)", "mean reward"),
    "reward": Panel(REWARD, "Reward (of the trajectories trained on)", "mean reward"),
    "length": Panel(LENGTH, "Response length (trained on)", "tokens, tool responses included", 0),
    "length-all": Panel(LENGTH_ALL, "Response length (all rollouts)", "tokens, tool responses included", 0),
    "tool-errors": Panel("rollout/tool_error_ratio", "Tool errors", "errors per call"),
    "tool-errors-positive": Panel("rollout/tool_error_ratio_positive", "Tool errors of positives", "errors per call"),
    "calls": Panel("rollout/calls_per_trajectory", "Tool calls", "calls a trajectory", 2),
    "no-call": Panel("rollout/no_tool_ratio", "Trajectories without a call", "share of rollouts"),
    "distinct-calls": Panel("rollout/distinct_call_ratio", "Distinct calls of a trajectory", "share of calls"),
    "void-turns": Panel("rollout/void_turn_ratio", "Void turns", "share of turns"),
    "improbable-tokens": Panel(
        "rollout/improbable_token_ratio", "Tokens of a probability below 1e-4", "share of generated tokens", 6
    ),
    "turns": Panel("rollout/num_turns", "Turns", "assistant turns a trajectory", 2),
    "entropy": Panel("train/actor/entropy", "Entropy", "nats a trained token"),
    "entropy-after-tool": Panel(
        "train/actor/entropy_after_tool", "Entropy of the first tokens after a tool response", "nats a trained token"
    ),
    "grad-norm": Panel("train/actor/grad_norm", "Gradient norm", "L2 norm before clipping"),
    "kl": Panel("train/actor/approx_kl", "KL to the old policy", "nats a trained token", 6),
    "rollout-kl": Panel("train/actor/rollout_kl", "KL between engine and actor (k3)", "nats a trained token", 6),
    "logprob-diff": Panel("rollout/logprob_diff_mean", "Log-prob difference, actor to engine", "nats a trained token", 8),
    "clip-fraction": Panel("train/actor/clip_fraction", "Clipped tokens", "share of trained tokens", 5),
    "dual-clip-fraction": Panel("train/actor/dual_clip_fraction", "Dual-clipped tokens", "share of trained tokens", 5),
    "response-clip": Panel("rollout/clip_ratio", "Responses at the length limit", "share of rollouts"),
    "time": Panel(SECONDS, "Time", "seconds a step", 1),
    "held-out": Panel("eval/average", "Held-out accuracy", "avg@k"),
}
DEFAULT_PANELS = ("pass-rate", "reward", "length", "tool-errors")


def panel(word: str) -> Panel:
    """The panel of a word of `PANELS`, or of a metric's own name."""
    known = {entry.metric: entry for entry in PANELS.values()}
    return PANELS.get(word) or known.get(word) or Panel(word, word, word.rpartition("/")[2])


COMPARABLE: dict[str, str] = {
    REWARD: "reward of the trajectories that are trained on: after rejection and resampling, in all three codes; "
    "it is not the pass rate, which only ours logs",
    LENGTH: "tokens of the response after resampling, tool responses included, in all three codes; a log that counts "
    "generated tokens only is lower",
    PASS_RATE: "share of right trajectories among all finished ones before rejection; not comparable to the reward of a code "
    "that rejects or resamples; of a verl log without either it is critic/rewards/mean",
    "rollout/tool_error_ratio": "ours counts typed outcomes of all rollouts, calls that are no JSON included; rStar's verl "
    "counts the word error, after rejection; compare_with_verl.sh counts error responses in verl's rollouts",
    "rollout/tool_error_ratio_positive": "as rollout/tool_error_ratio, of trajectories with a positive reward",
    "rollout/num_turns": "ours counts assistant turns; verl counts the prompt and the tool responses as well",
    "rollout/clip_ratio": "ours counts endings at the response budget; verl counts length == maximum",
    "train/actor/tis_ratio": "mean weight between engine and actor; verl's is the mean after truncation",
    "train/actor/tis_clip_fraction": "share of tokens above the truncation; of sequences where verl's rollout_is is sequence",
}


DIFFERENT_IN_VERL = ("rollout/tool_error_ratio", "rollout/tool_error_ratio_positive", "rollout/num_turns", "rollout/clip_ratio")
"""Metrics that verl counts by another rule, so that no conclusion is drawn between it and another code."""


def ours_from_verl(name: str) -> str:
    """Our name of a quantity of verl's; its own name when there is none here."""
    match = _VALIDATION.fullmatch(name)
    if match is None:
        return _FROM_VERL.get(name, name)
    ours = {"mean": "average", "best": f"pass@{match['k']}", "maj": f"majority@{match['k']}"}
    place = "" if match["source"] == HELD_OUT else f"{match['source']}/"
    return f"eval/{place}{ours[match['what']]}"
