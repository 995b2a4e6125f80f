"""Names of the same quantity in our metrics (RLinf's names), in RLinf's own logs and in verl's.

`COMPARABLE` notes how the quantity differs between the codes.
"""

from __future__ import annotations

import re

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
    "train/actor/approx_kl": ("actor/ppo_kl",),
    "train/actor/grad_norm": ("actor/grad_norm",),
    "train/actor/lr": ("actor/lr",),
    "train/actor/entropy": ("actor/entropy", "actor/entropy_loss"),
    "time/step": ("timing_s/step",),
    "time/rollout": ("timing_s/gen",),
    "time/training": ("timing_s/update_actor",),
    "time/resample": ("timing_s/down_sample",),
}

# verl: val-core/{data source}/{reward or acc}/{mean, best, maj}@{k}...; ours: eval/{task}/{average, pass@k, majority@k}
_VALIDATION = re.compile(
    r"val-(?:core|aux)/(?P<source>.+)/(?:reward|acc|score)/(?P<what>mean|best|maj)@(?P<k>\d+)(?:/mean)?"
)

_FROM_VERL = {theirs: ours for ours, names in TO_VERL.items() for theirs in names}

REWARD = "rollout/reward_scores"
LENGTH = "rollout/response_length"
PASS_RATE = "rollout/pass_rate"
RESAMPLED = "rollout/total_num_sequence"  # logged by every code that resamples

COMPARABLE: dict[str, str] = {
    REWARD: "reward of the trajectories that are trained on: after rejection and resampling, in all three codes; "
    "it is not the pass rate, which only ours logs",
    LENGTH: "tokens of the response after resampling, tool responses included, in all three codes; a log that counts "
    "generated tokens only is lower",
    PASS_RATE: "mean reward of every finished trajectory before rejection; not comparable to verl's or RLinf's reward",
    "rollout/tool_error_ratio": "ours counts typed outcomes of all rollouts; verl counts the word error, after "
    "rejection",
    "rollout/clip_ratio": "ours counts endings at the response budget; verl counts length == maximum",
}


def ours_from_verl(name: str) -> str:
    """Our name of a quantity of verl's; its own name when there is none here."""
    match = _VALIDATION.fullmatch(name)
    if match is None:
        return _FROM_VERL.get(name, name)
    ours = {"mean": "average", "best": f"pass@{match['k']}", "maj": f"majority@{match['k']}"}
    return f"eval/{match['source']}/{ours[match['what']]}"
