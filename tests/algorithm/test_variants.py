"""GSPO, GSPO-token, CISPO, filters and selections: cases worked by hand, slow second implementations, layouts."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rstar2_megatron.algorithm.filters import FILTERS
from rstar2_megatron.algorithm.layout_check import check_layouts
from rstar2_megatron.algorithm.loss import POLICY_LOSSES, Tokens
from rstar2_megatron.algorithm.roc import Rejection
from rstar2_megatron.algorithm.selection import Selection
from rstar2_megatron.algorithm.selection_rules import max_variance, uniform
from rstar2_megatron.runs.preflight import loss_problems
from rstar2_megatron.settings.sections.algorithm import FILTER_NAMES
from rstar2_megatron.trajectory import FinishReason, Group, Problem, ToolCall, ToolOutcome, Trajectory
from tests.algorithm.tokens import algorithm

PROBLEM = Problem("q", [{"role": "user", "content": "?"}], ["1"])
LENGTHS = (3, 1, 4)


def tokens(logprobs: Tensor, old: Tensor, advantages: list[float], lengths: tuple[int, ...], **keys: Any) -> Tokens:
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Tokens(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor(advantages, dtype=logprobs.dtype)[sequence],
        entropy=torch.zeros_like(old),
        sequence=sequence,
        position=torch.arange(len(old)),
        num_sequences=len(lengths),
        settings=algorithm(**keys),
    )


def losses(name: str, *arguments: Any, **keys: Any) -> tuple[list[float], list[bool], list[float]]:
    """(losses, clipped, gradient of their sum) of each token."""
    given = tokens(*arguments, **keys)
    given.logprobs.requires_grad_()
    found, values = POLICY_LOSSES[name](given)
    (gradient,) = torch.autograd.grad(found.sum(), given.logprobs)
    return found.tolist(), values["clipped"].tolist(), gradient.tolist()


def test_gspo_by_hand() -> None:
    """Two tokens of log ratio 0.3 and -0.1: s = exp(0.1), above the clip of 1.05 for A > 0, not cut for A < 0."""
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    new = old + torch.tensor([0.3, -0.1], dtype=torch.float64)
    s = math.exp(0.1)
    keys = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    found = losses("gspo", new, old, [2.0], (2,), **keys)
    assert found == ([pytest.approx(-2.1)] * 2, [True, True], [0.0, 0.0])
    found = losses("gspo", new, old, [-2.0], (2,), **keys)
    # each of the two equal losses 2 s has the gradient s A / 2 at each token
    assert found == ([pytest.approx(2 * s)] * 2, [False, False], [pytest.approx(2 * s)] * 2)
    found = losses("gspo-token", new, old, [-2.0], (2,), **keys)
    assert found == ([pytest.approx(2 * s)] * 2, [False, False], [pytest.approx(2 * s)] * 2)


def test_cispo_by_hand() -> None:
    """Ratios 1.5 and 0.5, weights cut to 1.2 and 0.9: the loss is -w A log pi, its gradient -w A, cut or not."""
    old = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    new = old + torch.tensor([math.log(1.5), math.log(0.5)], dtype=torch.float64)
    found = losses("cispo", new, old, [2.0], (2,), clip_ratio_low=0.1, clip_ratio_high=0.2)
    expected = [-1.2 * 2 * (-1 + math.log(1.5)), -0.9 * 2 * (-1 + math.log(0.5))]
    assert found == ([pytest.approx(x) for x in expected], [True, True], [pytest.approx(-2.4), pytest.approx(-1.8)])


def slow(name: str, new: list[float], old: list[float], advantages: list[float], low: float, high: float) -> list[float]:
    """Losses by loops over sequences and tokens."""
    result, start = [], 0
    for length, a in zip(LENGTHS, advantages):
        ratios = [math.exp(n - o) for n, o in zip(new[start : start + length], old[start : start + length])]
        s = math.prod(ratios) ** (1 / length)
        for place, ratio in enumerate(ratios):
            if name == "cispo":
                result.append(-min(max(ratio, 1 - low), 1 + high) * a * new[start + place])
            else:
                result.append(-min(s * a, min(max(s, 1 - low), 1 + high) * a))
        start += length
    return result


@pytest.mark.parametrize("name", ["gspo", "gspo-token", "cispo"])
@pytest.mark.parametrize("seed", range(5))
def test_losses_equal_a_slow_implementation(name: str, seed: int) -> None:
    rng = random.Random(seed)
    old = [-3 * rng.random() for _ in range(sum(LENGTHS))]
    new = [o + rng.gauss(0, 0.4) for o in old]
    advantages = [rng.gauss(0, 1) for _ in LENGTHS]
    keys = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
    given = torch.tensor(new, dtype=torch.float64), torch.tensor(old, dtype=torch.float64)
    found, _, gradient = losses(name, *given, advantages, LENGTHS, **keys)
    assert found == pytest.approx(slow(name, new, old, advantages, 0.1, 0.15))
    if name == "gspo":  # its gradient is the whole derivative; the others hold factors constant
        step = 1e-6
        for place in range(len(new)):
            moved = [n + step * (i == place) for i, n in enumerate(new)]
            there, here = (sum(slow(name, x, old, advantages, 0.1, 0.15)) for x in (moved, new))
            assert gradient[place] == pytest.approx((there - here) / step, abs=1e-4)


def test_gspo_and_gspo_token_have_the_same_gradient_when_sequences_are_averaged() -> None:
    """Section 4.3: with equal advantages in a sequence both objectives are the same, under the mean over its tokens."""
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -1.0, -2.5, -0.1], dtype=torch.float64)
    new = old + 0.02 * torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 2.0, 0.1, -0.3], dtype=torch.float64)
    weights = torch.tensor([1 / length for length in LENGTHS for _ in range(length)], dtype=torch.float64)
    gradients = []
    for name in ("gspo", "gspo-token"):
        given = tokens(new.clone().requires_grad_(), old, [1.0, -0.5, 2.0], LENGTHS)
        (gradient,) = torch.autograd.grad((POLICY_LOSSES[name](given)[0] * weights).sum(), given.logprobs)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_losses_do_not_depend_on_the_layout(name: str) -> None:
    check_layouts(POLICY_LOSSES[name])


@pytest.mark.parametrize("key", ["importance_sampling_fix", "decoupled_loss"])
def test_weights_of_tokens_and_of_sequences_are_refused_together(key: str) -> None:
    (said,) = loss_problems(algorithm(policy_loss="gspo", **{key: True}))
    assert "algorithm.policy_loss=gspo" in said and f"algorithm.{key}=True" in said
    assert not list(loss_problems(algorithm(policy_loss="gspo-token", **{key: True})))


# ------------------------------------------------------------------------------------------------ filters


def attempt(
    *turns: tuple[str, list[ToolOutcome]],
    ending: FinishReason = FinishReason.ANSWERED,
    codes: str = "abcdef",
    reward: float = 0.0,
) -> Trajectory:
    names = iter(codes)
    calls = [[ToolCall("python", {"code": next(names)}, outcome, "") for outcome in outcomes] for _, outcomes in turns]
    return Trajectory(
        "q",
        0,
        assistant_texts=[text for text, _ in turns],
        tool_calls=[call for made in calls for call in made],
        calls_per_turn=[len(made) for made in calls if made],
        finish_reason=ending,
        reward=reward,
    )


OK, ERROR, TIMEOUT, MALFORMED = ToolOutcome.OK, ToolOutcome.ERROR, ToolOutcome.TIMEOUT, ToolOutcome.MALFORMED
ANSWER = ("so \\boxed{1}", [])


@pytest.mark.parametrize(
    ("trajectory", "left_out"),
    [
        (attempt(("a", [OK]), ANSWER), []),
        (attempt(ANSWER), []),
        (attempt(("a", [ERROR]), ("b", [OK]), ANSWER), []),
        (attempt(("a", [OK]), ("I do not know", [])), ["void_turns"]),
        (attempt(("a", [MALFORMED]), ("b", [OK]), ANSWER), ["void_turns"]),
        (attempt(("a", [ERROR]), ("b", [TIMEOUT]), ANSWER), ["failed_calls"]),
        (attempt(("a", [OK]), ("b", [MALFORMED]), ending=FinishReason.MALFORMED_CALLS), ["void_turns", "malformed_ending"]),
        (attempt(("a", [OK]), ("b", []), ending=FinishReason.MALFORMED_CALLS), ["void_turns", "malformed_ending"]),
        (attempt(("a", [OK]), ("b", [MALFORMED]), ending=FinishReason.TURN_LIMIT), ["void_turns", "malformed_ending"]),
        (attempt(("a", [OK]), ("b", [MALFORMED]), ANSWER), ["void_turns"]),
        (replace(attempt(("I do not know", []), ending=FinishReason.TURN_LIMIT), calls_per_turn=[0]), ["void_turns"]),
        (attempt(("a", [OK]), ("so <answer>1</answer>", [])), []),
        (attempt(("a", [OK]), ("b", [OK]), ANSWER, codes="xx"), ["repeated_calls"]),
        (attempt(("a", [OK]), ("and so on", []), ending=FinishReason.LENGTH_LIMIT), ["void_turns", "truncated"]),
        (attempt(("a", [OK]), ending=FinishReason.TOOL_RESPONSE_TOO_LONG), ["truncated"]),
        (attempt(("a", [OK]), ("b", [OK]), ending=FinishReason.TURN_LIMIT), []),
        (attempt(("a", [OK]), ("b", []), ending=FinishReason.TURN_LIMIT), []),  # a call that is not run is not noted
        (attempt(("a", [OK]), ("b", []), ending=FinishReason.REPEATED_CALL), ["repeated_calls"]),
        (attempt(("a", [MALFORMED]), ("b", [MALFORMED]), ANSWER, codes="xx"), ["void_turns", "failed_calls"]),
    ],
)
def test_filters(trajectory: Trajectory, left_out: list[str]) -> None:
    assert [name for name in FILTERS if not FILTERS[name](PROBLEM, trajectory)] == left_out
    assert tuple(FILTERS) == FILTER_NAMES


def test_a_filtered_trajectory_has_no_part_in_the_group() -> None:
    """Of two right and two wrong ones the wrong ones are void: the rest is of equal reward, so the group is rejected."""
    right, wrong = attempt(ANSWER, reward=1.0), attempt(("I do not know", []))
    sampling = {
        "down_sampling_config": {"down_sample_to_n": 2, "min_zero_reward_trace_num": 1, "min_non_zero_reward_trace_num": 1}
    }
    group = Group(PROBLEM, [right, wrong, right, wrong])
    (kept,) = Selection(algorithm(group_size=4, down_sampling=sampling)).resample([group], ["s"])
    assert (kept.reason, kept.filtered) == (Rejection.NONE, {})
    settings = algorithm(group_size=4, down_sampling=sampling, trajectory_filters=["void_turns", "truncated"])
    (kept,) = Selection(settings).resample([group], ["s"])
    assert (kept.reason, kept.filtered) == (Rejection.ALL_CORRECT, {"void_turns": 2, "truncated": 0})


# --------------------------------------------------------------------------------------------- selections


def group_of(rewards: list[float]) -> Group:
    return Group(PROBLEM, [attempt(ANSWER, reward=reward) for reward in rewards])


def test_max_variance_of_binary_rewards_is_half_and_half() -> None:
    chosen = max_variance(group_of([1, 1, 1, 1, 0, 0, 0, 1]), 4, random.Random(0))
    assert sum(i in (4, 5, 6) for i in chosen) == 2 and len(set(chosen)) == 4
    chosen = max_variance(group_of([1, 1, 1, 1, 1, 0]), 4, random.Random(0))
    assert 5 in chosen and len(set(chosen)) == 4


@pytest.mark.parametrize("seed", range(8))
def test_max_variance_equals_the_best_of_all_subsets(seed: int) -> None:
    rng = random.Random(seed)
    rewards = [rng.choice([0.0, 0.2, 0.5, 1.0, 1.3]) for _ in range(8)]
    for count in (1, 3, 4, 8):
        chosen = max_variance(group_of(rewards), count, rng)
        best = max(statistics.pvariance(subset) for subset in itertools.combinations(rewards, count))
        assert len(set(chosen)) == count
        assert statistics.pvariance([rewards[i] for i in chosen]) == pytest.approx(best)


def test_uniform_takes_each_equally_often_and_the_same_under_a_seed() -> None:
    group, counts = group_of([0.0] * 6), [0] * 6
    for seed in range(3000):
        for index in uniform(group, 2, random.Random(seed)):
            counts[index] += 1
    assert all(850 < count < 1150 for count in counts)
    assert uniform(group, 2, random.Random("s")) == uniform(group, 2, random.Random("s"))
    assert sorted(uniform(group, 9, random.Random(0))) == list(range(6))


@pytest.mark.parametrize("mode", ["max_variance", "uniform"])
def test_selections_by_name_keep_g(mode: str) -> None:
    sampling = {"down_sampling_config": {"down_sample_to_n": 2, "mode": mode, "min_zero_reward_trace_num": 1,
                                         "min_non_zero_reward_trace_num": 1}}  # fmt: skip
    selection = Selection(algorithm(group_size=4, down_sampling=sampling))
    results = selection.resample([group_of([1.0, 0.0, 0.0, 1.0]), group_of([1.0] * 4)], ["a", "b"])
    assert [(result.reason, len(result.kept)) for result in results] == [(Rejection.NONE, 2), (Rejection.ALL_CORRECT, 0)]
    assert len(results[0].penalties) == 4, "measured as in paper mode"
