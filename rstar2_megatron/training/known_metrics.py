"""Names that metrics.jsonl of a run can have, so that a condition on another one is refused before the start. Pure."""

from __future__ import annotations

import difflib

_NAMES = {
    "rollout": (
        "pass_rate reward_after_rejection reward_scores response_length_all response_length_after_rejection response_length "
        "max_of_response_length min_of_response_length prompt_length logprob_mean logprob_min improbable_token_ratio "
        "logprob_diff_mean logprob_diff_max num_trajectories total_num_sequence dropped_cut dropped_infrastructure "
        "generated_tokens tokens_per_second groups groups_kept groups_rejected groups_rejected_ratio "
        "groups_rejected_all_correct groups_rejected_all_wrong groups_rejected_too_few groups_never_solved "
        "groups_always_solved clip_ratio fraction_of_samples_properly_ended num_turns max_of_num_turns min_of_num_turns "
        "trajectory_seconds tool_seconds_per_trajectory max_of_tool_seconds_per_trajectory "
        "min_of_tool_seconds_per_trajectory generate_seconds_per_trajectory max_of_generate_seconds_per_trajectory "
        "min_of_generate_seconds_per_trajectory tool_error_ratio tool_error_ratio_positive tool_error_ratio_negative "
        "tool_calls tool_calls_positive tool_calls_negative no_tool_ratio no_tool_ratio_positive no_tool_ratio_negative "
        "calls_per_trajectory distinct_call_ratio void_turn_ratio tool_seconds max_of_tool_seconds penalty_error "
        "penalty_format penalty_error_kept penalty_format_kept answers_per_trajectory answers_zero answers_one "
        "answers_many judge_restarts outside_corridor"
    ),
    "train": "tokens_per_second",
    "train/actor": (
        "policy_loss grad_norm lr ratio clip_fraction dual_clip_fraction approx_kl entropy entropy_after_tool "
        "logprob_diff_mean logprob_diff_max logprob_drift rollout_kl tis_ratio tis_ratio_max tis_clip_fraction "
        "reference_kl trained_tokens total_tokens masked_tokens masked_token_fraction masked_sequence_fraction "
        "optimizer_steps skipped_steps skipped_update num_microbatches imbalance seconds tflops_per_rank mfu "
        "handover_seconds sync_seconds sync_bytes sync_bytes_per_second sync_fallbacks overlong_punishment"
    ),
    "time": "step rollout checkpoint resample batch training save sync_weights to_first_step",
    "share": "rollout tail grading training sync checkpoint other",
    "eval": (
        "average average_low average_high reward problems samples missing tool_calls tool_error_ratio "
        "tool_error_ratio_positive no_tool_ratio num_turns response_length response_length_p50 response_length_p90 "
        "max_of_response_length generated_length seconds"
    ),
}
KNOWN = frozenset(f"{prefix}/{name}" for prefix, names in _NAMES.items() for name in names.split())
# Here the data, the engines, the judge and code of the user name what is counted.
_OPEN = (
    *(f"rollout/{part}/" for part in ("engine", "finish", "tool_outcome", "grade", "reward", "filtered", "user_code_errors")),
    *(f"train/actor/{part}/" for part in ("loss", "logprob_diff_turn")),
    *(f"eval/{part}" for part in ("pass@", "majority@", "finish/")),
)


def unknown_metric(name: str) -> str:
    """Why no run has a metric of this name, with the nearest that one can have; "" for a name that one can have."""
    section, _, last = name.rpartition("/")
    of_task = section.startswith("eval/") and (f"eval/{last}" in KNOWN or last.startswith(("pass@", "majority@")))
    if name in KNOWN or of_task or name.startswith(_OPEN):
        return ""
    near = difflib.get_close_matches(name, sorted(KNOWN), n=3, cutoff=0.0)
    return f"no run has a metric {name!r}; the nearest are {', '.join(near)} (docs/metrics.md)"
