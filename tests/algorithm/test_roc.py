"""Resample-on-correct: penalties, quotas, sampling probabilities, and parity with the public rules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.algorithm.penalty import paper_penalty, released_penalty
from rstar2_megatron.algorithm.response_text import response_text
from rstar2_megatron.algorithm.roc import Rejection, ResampleResult, resample_on_correct
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import FinishReason, ToolOutcome, Trajectory
from tests.algorithm.slow_roc import slow_paper_quotas, slow_released, slow_released_quotas
from tests.algorithm.trajectories import group, num_kept_positive, trajectory

OK, ERROR, TIMEOUT = ToolOutcome.OK, ToolOutcome.ERROR, ToolOutcome.TIMEOUT
MALFORMED, INFRASTRUCTURE = ToolOutcome.MALFORMED, ToolOutcome.INFRASTRUCTURE


def config(n: int = 16, **changes) -> DownSamplingConfig:
    return DownSamplingConfig(**{"down_sample_to_n": n, **changes})


def resample(trajectories: list[Trajectory], cfg: DownSamplingConfig, seed: int = 0) -> ResampleResult:
    return resample_on_correct([trajectories], cfg, [str(seed)])[0]


# ------------------------------------------------------------------------------------------- penalties


@pytest.mark.parametrize(
    ("calls", "answers", "error", "answer_format"),
    [
        ([], 1, 0.5, 0.0),  # no tool: 0.5; a turn of one's own is a turn
        ([OK], 1, 0.0, 0.0),
        ([OK, ERROR], 1, 0.5, 0.0),
        ([TIMEOUT, MALFORMED], 1, 1.0, 0.0),
        ([OK, INFRASTRUCTURE], 1, 0.0, 0.0),  # the judge's failure is not the model's
        ([INFRASTRUCTURE], 1, 0.5, 0.0),
        ([OK], 0, 0.0, 1.0),
        ([OK], 2, 0.0, 0.5),  # (2 - 1) / 2 turns
        ([OK], 9, 0.0, 1.0),
    ],
)
def test_paper_penalties(calls, answers, error, answer_format) -> None:
    penalty = paper_penalty(trajectory(1.0, calls, answers))
    assert (penalty.error, penalty.answer_format) == (error, answer_format)


@pytest.mark.parametrize(
    ("calls", "answers", "error", "answer_format"),
    [
        ([], 1, 0.5, 1.0),  # the first turn's header is in the prompt: no turn counted, worst format
        ([OK], 1, 0.0, 0.0),
        ([ERROR, OK], 1, 0.5, 0.0),
        ([TIMEOUT], 1, 0.0, 0.0),  # no "error" in its text
        ([MALFORMED], 1, 0.0, 0.0),
        ([(OK, "relative error 1e-9")], 1, 1.0, 0.0),  # false hit
        ([OK], 0, 0.0, 1.0),
        ([OK, OK], 2, 0.0, 0.5),  # (2 - 1) / 2 turns, of 3
    ],
)
def test_released_penalties_keep_the_known_deviations(calls, answers, error, answer_format) -> None:
    penalty = released_penalty(trajectory(1.0, calls, answers))
    assert (penalty.error, penalty.answer_format) == (error, answer_format)


@pytest.mark.parametrize(
    ("texts", "answer_format"),
    [
        (["", "<answer>1</answer>"], 0.0),
        (["<answer>1</answer>", ""], 0.0),
        (["", "<answer>1</answer> <answer>"], 1.0),
        (["", "<answer>1</answer> </answer>"], 1.0),
        (["", "</answer> 1 <answer>"], 1.0),
        (["", "<answer>1 <answer>2</answer></answer>"], 1.0),
        (["<answer>1</answer>", "<answer>2</answer>"], 1.0),
        (["<answer>1</answer>", "", "<answer>2</answer>"], 0.5),
    ],
)
def test_released_answer_tags_must_pair_up(texts: list[str], answer_format: float) -> None:
    t = trajectory(1.0, [OK] * (len(texts) - 1))
    t.assistant_texts = texts
    assert released_penalty(t).answer_format == answer_format


def test_paper_counts_an_answer_that_does_not_close() -> None:
    t = trajectory(1.0, [OK])
    t.assistant_texts[-1] += " <answer>"
    assert paper_penalty(t).answer_format == 0.5


def test_response_text_follows_how_the_trajectory_ended() -> None:
    closed = response_text(trajectory(0.0, [OK]))
    assert closed.count("<|im_start|>assistant") == 1 and closed.endswith("<|im_end|>")
    cut = response_text(trajectory(0.0, [OK], finish=FinishReason.LENGTH_LIMIT))
    assert not cut.endswith("<|im_end|>")
    unanswered = trajectory(0.0, [OK, (ERROR, "error: too long to fit")])
    unanswered.assistant_texts.pop()  # ended on the call whose response did not fit
    unanswered.finish_reason = FinishReason.TOOL_RESPONSE_TOO_LONG
    assert "too long to fit" not in response_text(unanswered)
    header_only = trajectory(0.0, [OK], finish=FinishReason.LENGTH_LIMIT)
    header_only.assistant_texts.pop()
    assert response_text(header_only).endswith("<|im_start|>assistant\n<reason>")


def test_response_text_has_what_an_environment_answered() -> None:
    """verl's reward functions read it as solution_str; a turn is answered by tools or by the environment."""
    t = trajectory(0.0, [OK])
    t.assistant_texts, t.observations, t.calls_per_turn = ["3", "call", "4"], ["higher", ""], [0, 1]
    header = "<|im_end|>\n<|im_start|>assistant\n<reason>"
    assert response_text(t) == (
        f"3<|im_end|><|im_start|>user\nhigher{header}call<|im_end|><|im_start|>user\n<tool_response>\n42\n</tool_response>{header}"
        "4<|im_end|>"
    )


# ---------------------------------------------------------------------------------- released selection


outcomes = st.lists(st.sampled_from([OK, ERROR, TIMEOUT, MALFORMED]), max_size=4)
any_trajectory = st.builds(
    trajectory,
    st.sampled_from([0.0, 1.0]),
    outcomes,
    st.integers(0, 3),
    finish=st.sampled_from([FinishReason.ANSWERED, FinishReason.LENGTH_LIMIT, FinishReason.TURN_LIMIT]),
)


@given(
    st.lists(st.lists(any_trajectory, max_size=20), min_size=1, max_size=4),
    st.integers(2, 12),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_released_mode_keeps_the_same_indices(groups, n, reject, least_bad, least_good) -> None:
    """Groups of any sizes in one step, each as the slow rules keep it."""
    cfg = config(
        n,
        mode="released",
        reject_equal_reward=reject,
        min_zero_reward_trace_num=min(least_bad, n // 2),
        min_non_zero_reward_trace_num=min(least_good, n // 2),
    )
    results = resample_on_correct(groups, cfg, [""] * len(groups))
    assert [result.indices for result in results] == [slow_released(g, cfg) if g else [] for g in groups]


def kept_counts(groups: Sequence[list[Trajectory]], cfg: DownSamplingConfig) -> list[tuple[int, int]]:
    """(positives, negatives) that each group keeps."""
    results = resample_on_correct(groups, cfg, [str(i) for i in range(len(groups))])
    positives = [num_kept_positive(result) for result in results]
    return [(p, len(result.kept) - p) for p, result in zip(positives, results)]


@pytest.mark.parametrize(
    ("num_positive", "positive", "negative"),
    [(1, 1, 15), (2, 2, 14), (4, 2, 14), (16, 8, 8), (28, 14, 2), (30, 14, 2), (31, 15, 1)],
)
def test_released_quotas_of_32_to_16(num_positive: int, positive: int, negative: int) -> None:
    """Figures measured on the public code."""
    mixed = group([1.0] * num_positive + [0.0] * (32 - num_positive))
    assert kept_counts([mixed], config(mode="released")) == [(positive, negative)]


@pytest.mark.parametrize(("mode", "slow"), [("paper", slow_paper_quotas), ("released", slow_released_quotas)])
@pytest.mark.parametrize(
    ("target", "least_bad", "least_good"), [(1, 0, 0), (8, 0, 0), (8, 2, 2), (8, 5, 2), (16, 2, 5), (16, 0, 1)]
)
def test_quotas_of_every_split_at_once(mode: str, slow, target: int, least_bad: int, least_good: int) -> None:
    """Of all groups that have more than the target, and whose quotas add up to it."""
    cfg = config(target, mode=mode, min_zero_reward_trace_num=least_bad, min_non_zero_reward_trace_num=least_good)
    splits = [(p, n - p) for n in range(target + 1, 29) for p in range(1, n)]
    splits = [split for split in splits if sum(slow(*split, cfg)) == target]
    assert len(splits) > 100
    assert kept_counts([group([1.0] * p + [0.0] * n) for p, n in splits], cfg) == [slow(p, n, cfg) for p, n in splits]


def test_odd_targets_have_a_rule_where_the_public_code_asserts() -> None:
    """14 to 7 with 7 and 7: both quotas round to 4; the lowest penalties of all are kept, positives first."""
    cfg = config(7, mode="released", min_zero_reward_trace_num=0, min_non_zero_reward_trace_num=0)
    assert slow_released_quotas(7, 7, cfg) == (4, 4)
    assert kept_counts([group([0, 1] * 7)], cfg) == [(7, 0)]


# -------------------------------------------------------------------------------------- paper selection


def test_draws_have_the_stated_probabilities() -> None:
    """Two of four positives, one by one with probability proportional to 1 / (penalty + epsilon), and one of two negatives.

    Exact inclusion probabilities, by enumeration, against 5,000 groups.
    """
    positives = [trajectory(1.0, calls) for calls in ([OK], [OK, OK, OK, ERROR], [], [ERROR])]
    assert [p.error + p.answer_format for p in map(paper_penalty, positives)] == [0, 0.25, 0.5, 1]
    negatives = [trajectory(0.0, [OK]), trajectory(0.0, [ERROR])]
    cfg = config(3, penalty_epsilon=0.1, min_zero_reward_trace_num=1, min_non_zero_reward_trace_num=1)
    weights, repeats = [1 / 0.1, 1 / 0.35, 1 / 0.6, 1 / 1.1], 5_000
    expected = [0.0] * 4 + [0.5] * 2
    for order in itertools.permutations(range(4), 2):
        probability, left = 1.0, sum(weights)
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        for i in order:
            expected[i] += probability
    results = resample_on_correct([positives + negatives] * repeats, cfg, [f"7-{i}" for i in range(repeats)])
    seen = Counter(i for result in results for i in result.indices)
    for i, p in enumerate(expected):
        assert abs(seen[i] - repeats * p) < 5 * (repeats * p * (1 - p)) ** 0.5 + 1


@given(st.lists(any_trajectory, min_size=1, max_size=40), st.integers(2, 16), st.integers(0, 10))
def test_paper_mode_invariants(trajectories, n, seed) -> None:
    cfg = config(n, min_zero_reward_trace_num=1, min_non_zero_reward_trace_num=1)
    result = resample(trajectories, cfg, seed)
    rewards = [t.reward for t in trajectories]
    assert result.indices == sorted(set(result.indices))
    assert [id(t) for t in result.kept] == [id(trajectories[i]) for i in result.indices]
    if len(set(rewards)) == 1:
        assert result.rejected and not result.kept
        assert result.reason is (Rejection.ALL_CORRECT if rewards[0] else Rejection.ALL_WRONG)
        return
    assert not result.rejected
    assert len(result.kept) == min(n, len(trajectories))
    negatives = len(result.kept) - num_kept_positive(result)
    assert negatives >= 1 and num_kept_positive(result) >= 1
    if len(trajectories) > n:
        num_positive = sum(reward > 0 for reward in rewards)
        half = (len(trajectories) - num_positive) * n // len(trajectories)
        assert negatives == max(half, 1) or num_kept_positive(result) == num_positive
    assert resample(trajectories, cfg, seed).indices == result.indices  # a seed decides everything


@given(st.lists(st.lists(any_trajectory, max_size=20), min_size=2, max_size=4), st.integers(0, 5))
def test_a_group_is_resampled_alike_whatever_stands_beside_it(groups, seed) -> None:
    cfg = config(6)
    seeds = [f"{seed}-{i}" for i in range(len(groups))]
    together = resample_on_correct(groups, cfg, seeds)
    alone = [resample_on_correct([g], cfg, [s])[0] for g, s in zip(groups, seeds)]
    assert together == alone


def test_another_seed_draws_others() -> None:
    one = group([1.0] * 16 + [0.0] * 16)
    assert len({tuple(resample(one, config(), seed).indices) for seed in range(20)}) == 20


def test_plain_halves_of_the_paper_without_minimum_counts() -> None:
    cfg = config(16, min_zero_reward_trace_num=0, min_non_zero_reward_trace_num=0)
    for positives in range(1, 32):
        result = resample(group([1.0] * positives + [0.0] * (32 - positives)), cfg)
        assert len(result.kept) - num_kept_positive(result) == (32 - positives) // 2
        assert num_kept_positive(result) == 16 - (32 - positives) // 2


@pytest.mark.parametrize(("changes", "kept"), [({}, 2), ({"roc_error_ratio": False}, 0), ({"roc_answer_format": False}, 1)])
def test_switches_turn_penalties_off(changes, kept) -> None:
    """Which of three positives has the lowest penalty depends on what is counted."""
    trajectories = [
        trajectory(1.0, [ERROR], answers=1),  # 1 + 0
        trajectory(1.0, [OK, OK, OK, ERROR], answers=0),  # 1/4 + 1
        trajectory(1.0, [OK, OK, ERROR], answers=2),  # 1/3 + 1/3
        trajectory(0.0, [OK]),
    ]
    cfg = config(2, mode="released", min_zero_reward_trace_num=1, min_non_zero_reward_trace_num=1)
    cfg = cfg.model_copy(update=changes)
    assert resample(trajectories, cfg).indices == [kept, 3]


# ---------------------------------------------------------------------------------------------- edges


def test_fewer_rollouts_than_the_target() -> None:
    """Infrastructure took some: paper mode trains on what is left, the public code drops the group."""
    few = group([1, 0, 0])
    assert resample(few, config(8)).indices == [0, 1, 2]
    released = resample(few, config(8, mode="released"))
    assert released.rejected and released.reason is Rejection.TOO_FEW
    empty = resample([], config(8))
    assert empty.rejected and empty.reason is Rejection.TOO_FEW


def test_equal_rewards_are_kept_when_rejection_is_off() -> None:
    result = resample(group([1.0] * 8), config(4, reject_equal_reward=False))
    assert len(result.kept) == 4 and not result.rejected


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="q#0 has not been graded"):
        resample([trajectory(None)], config())
    with pytest.raises(ValueError, match="q#5: spoiled by infrastructure"):
        resample([trajectory(0.0, index=5, finish=FinishReason.INFRASTRUCTURE)], config())
