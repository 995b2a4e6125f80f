"""Metrics of a step computed by hand, and the terminal line."""

from __future__ import annotations

import pytest

from rstar2_megatron.actor.losses import MAXIMA, SUMS, rl_metrics
from rstar2_megatron.algorithm.roc import resample_on_correct
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.training.known_metrics import unknown_metric
from rstar2_megatron.training.metrics import HEADER_LINE, rollout_metrics, staleness_metrics, step_line, step_metrics
from rstar2_megatron.trajectory import FinishReason, Group, Problem, ToolOutcome, Trajectory, VersionSpan
from tests.algorithm.trajectories import trajectory

OK, ERROR = ToolOutcome.OK, ToolOutcome.ERROR
CONFIG = DownSamplingConfig(down_sample_to_n=2, min_zero_reward_trace_num=1, min_non_zero_reward_trace_num=1)


def groups() -> list[Group]:
    """A mixed group with a lost trajectory and one that was cut, an all-correct one, an all-wrong one."""
    mixed = [
        trajectory(1.0, [OK], index=0, tokens=10),
        trajectory(0.0, [ERROR, ERROR], index=1, tokens=20),
        trajectory(0.0, [], index=2, tokens=30, answers=0, finish=FinishReason.LENGTH_LIMIT),
        trajectory(None, [OK], index=3, tokens=5, finish=FinishReason.INFRASTRUCTURE),
        Trajectory("0", 4, [], finish_reason=FinishReason.CUT),
    ]
    correct = [trajectory(1.0, [ERROR, OK], index=i, tokens=40) for i in range(2)]
    wrong = [trajectory(0.0, [OK], index=i, tokens=60, answers=2) for i in range(2)]
    for one in (*mixed, *correct, *wrong):
        one.seconds = 3.0
    return [Group(Problem(str(i), [], ["1"]), list(ts)) for i, ts in enumerate((mixed, correct, wrong))]


def measured() -> tuple[list[Group], dict[str, float], list[Trajectory]]:
    step = groups()
    resampled = resample_on_correct([g.usable for g in step], CONFIG, [""] * len(step))
    actor = {"actor/policy_loss": 0.5, "actor/logprob_diff_mean": 1e-6}
    seconds = {"rollout": 2.0, "training": 0.5, "step": 3.0, "sync_weights": 0.1}
    kept = [t for r in resampled for t in r.kept]
    return step, step_metrics(step, resampled, actor, {"restarts": 1}, seconds), kept


def test_reward_and_length_at_three_places() -> None:
    _, m, kept = measured()
    assert m["rollout/pass_rate"] == pytest.approx(3 / 7)
    assert m["rollout/reward_after_rejection"] == pytest.approx(1 / 3)
    assert m["rollout/reward_scores"] == 0.5
    assert m["rollout/response_length_all"] == pytest.approx((10 + 20 + 30 + 80 + 120) / 7)
    assert m["rollout/response_length_after_rejection"] == 20
    lengths = [len(t.response_ids) for t in kept]
    assert m["rollout/response_length"] == sum(lengths) / 2
    assert m["rollout/max_of_response_length"] == max(lengths)
    assert m["rollout/total_num_sequence"] == 2 and m["rollout/prompt_length"] == 3


def test_groups_endings_tools_and_format_are_counted() -> None:
    _, m, _ = measured()
    expected = {
        "rollout/groups": 3,
        "rollout/groups_kept": 1,
        "rollout/groups_rejected": 2,
        "rollout/groups_rejected_ratio": 2 / 3,
        "rollout/groups_rejected_all_correct": 1,
        "rollout/groups_rejected_all_wrong": 1,
        "rollout/groups_rejected_too_few": 0,
        "rollout/groups_never_solved": 1,
        "rollout/groups_always_solved": 1,
        "rollout/num_trajectories": 9,
        "rollout/dropped_infrastructure": 1,
        "rollout/dropped_cut": 1,
        "rollout/finish/answered": 6,
        "rollout/finish/length_limit": 1,
        "rollout/finish/infrastructure": 1,
        "rollout/finish/cut": 1,
        "rollout/finish/turn_limit": 0,
        "rollout/generated_tokens": 265,
        "rollout/tool_error_ratio": 4 / 9,
        "rollout/tool_error_ratio_positive": 2 / 5,
        "rollout/tool_error_ratio_negative": 2 / 4,
        "rollout/tool_outcome/error": 4,
        "rollout/no_tool_ratio": 1 / 7,
        "rollout/clip_ratio": 1 / 7,
        "rollout/fraction_of_samples_properly_ended": 6 / 7,
        "rollout/num_turns": (2 + 3 + 1 + 3 + 3 + 2 + 2) / 7,
        "rollout/max_of_num_turns": 3,
        "rollout/tool_seconds": 0.5,
        "rollout/tool_seconds_per_trajectory": 9 * 0.5 / 7,
        "rollout/max_of_tool_seconds_per_trajectory": 1.0,
        "rollout/min_of_tool_seconds_per_trajectory": 0.0,
        "rollout/generate_seconds_per_trajectory": 3.0 - 9 * 0.5 / 7,
        "rollout/max_of_generate_seconds_per_trajectory": 3.0,
        "rollout/min_of_generate_seconds_per_trajectory": 2.0,
        "rollout/answers_zero": 1,
        "rollout/answers_one": 4,
        "rollout/answers_many": 2,
        "rollout/grade/correct": 3,
        "rollout/grade/wrong": 4,
    }
    assert {name: m[name] for name in expected} == pytest.approx(expected)


def test_signs_of_a_collapse_by_hand() -> None:
    """Three usable trajectories: a repeated call, a turn whose only call is malformed, no call; one has a token of 1e-5."""
    turns = [trajectory(1.0, [OK, OK, ERROR], tokens=4), trajectory(0.0, [ToolOutcome.MALFORMED], tokens=4)]
    step = [*turns, trajectory(0.0, [], tokens=2), trajectory(0.0, [OK] * 9, finish=FinishReason.INFRASTRUCTURE)]
    for number, code in enumerate(("1", "2", "1")):
        turns[0].tool_calls[number].arguments = {"code": code}
    step[2].rollout_logprobs[1] = -11.5
    m = rollout_metrics([Group(Problem("q", [], ["1"]), step)], resample_on_correct([step[:3]], CONFIG, [""]))
    assert m["rollout/calls_per_trajectory"] == pytest.approx(4 / 3)
    assert m["rollout/distinct_call_ratio"] == pytest.approx(2 / 3)
    assert m["rollout/void_turn_ratio"] == pytest.approx(1 / 7)
    assert m["rollout/no_tool_ratio"] == pytest.approx(1 / 3)
    assert m["rollout/logprob_min"] == -11.5 and m["rollout/improbable_token_ratio"] == pytest.approx(1 / 10)
    without = rollout_metrics([], [])
    assert "rollout/distinct_call_ratio" not in without and "rollout/logprob_min" not in without


def test_conditions_may_be_on_every_metric_of_a_step_and_on_no_other() -> None:
    """`known_metrics` is written by hand; tests/e2e asks the same of a whole run."""
    _, m, _ = measured()
    actor = dict.fromkeys((*SUMS, *MAXIMA, "grad_norm", "lr"), 1.0)
    m |= {f"train/{name}": value for name, value in rl_metrics([actor], with_reference=True).items()}
    assert [name for name in m if unknown_metric(name)] == []
    assert not unknown_metric("eval/math/average") and not unknown_metric("eval/pass@4")
    assert "rollout/void_turn_ratio" in unknown_metric("rollout/void_turns") and unknown_metric("eval/avrage")


def test_parts_are_named_and_rates_follow_from_them() -> None:
    _, m, kept = measured()
    assert m["train/actor/policy_loss"] == 0.5 and m["rollout/engine/restarts"] == 1
    assert m["time/step"] == 3.0 and m["rollout/logprob_diff_mean"] == 1e-6
    assert m["rollout/tokens_per_second"] == 265 / 2
    assert m["train/tokens_per_second"] == sum(t.length for t in kept) / 0.5


def test_a_step_that_keeps_nothing_leaves_its_means_out() -> None:
    step = groups()[1:]
    m = rollout_metrics(step, resample_on_correct([g.usable for g in step], CONFIG, [""] * len(step)))
    assert m["rollout/total_num_sequence"] == 0 and m["rollout/pass_rate"] == 0.5
    assert "rollout/reward_scores" not in m and "rollout/response_length" not in m
    assert "-" in step_line({"step": 1, **m})
    empty = rollout_metrics([], [])
    assert "rollout/pass_rate" not in empty and empty["rollout/tool_calls"] == 0
    assert not [name for name in empty if "tool_ratio" in name or "error_ratio" in name]  # no call, no ratio


def test_lines_align_with_the_header() -> None:
    _, m, _ = measured()
    lines = [step_line({"step": step, **m}) for step in (1, 20, 12345)] + [step_line({"step": 3})]
    assert {len(line) for line in lines} == {len(HEADER_LINE)}
    broken = step_line({"step": 1, "rollout/pass_rate": float("nan")})
    assert len(broken) == len(HEADER_LINE)


def test_staleness_is_that_of_the_trained_tokens() -> None:
    """Of 20 tokens 12 are of the present weights 7, and 8 are two versions older."""
    first, second = trajectory(1.0, [], tokens=10), trajectory(0.0, [], tokens=10)
    first.version_spans = [VersionSpan(0, 8, 5), VersionSpan(8, 10, 7)]
    second.version_spans = [VersionSpan(0, 10, 7)]
    m = staleness_metrics([first, second], 7, 3)
    assert [m[f"staleness_share/{n}"] for n in range(4)] == [0.6, 0, 0.4, 0]
    assert (m["staleness_mean"], m["staleness_max"]) == (0.8, 2)
    assert staleness_metrics([], 7, 1)["staleness_max"] == 0


def test_tokens_a_second_of_engines_that_go_on_are_those_of_the_whole_step() -> None:
    step = groups()
    resampled = resample_on_correct([g.usable for g in step], CONFIG, [""] * len(step))
    seconds = {"rollout": 2.0, "training": 0.5, "step": 4.0}
    apart = step_metrics(step, resampled, {}, {}, seconds)
    together = step_metrics(step, resampled, {}, {"trainer_idle_seconds": 2.0}, seconds)
    assert apart["rollout/tokens_per_second"] == 2 * together["rollout/tokens_per_second"] > 0
