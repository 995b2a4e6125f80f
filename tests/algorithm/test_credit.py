"""Overlong punishment and advantages of turns: cases worked by hand, slow second implementations, layouts, refusals."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rstar2_megatron.algorithm.advantage import group_advantages
from rstar2_megatron.algorithm.batch import TokenBlock, TrainBatch, train_sequence
from rstar2_megatron.algorithm.credit import advantages_of, overlong_metrics, punishment, turn_returns
from rstar2_megatron.algorithm.layout_check import check_layouts, load_policy_loss
from rstar2_megatron.algorithm.loss import POLICY_LOSSES, PolicyLoss
from rstar2_megatron.algorithm.roc import Rejection
from rstar2_megatron.algorithm.selection import Selection
from rstar2_megatron.runs.preflight import loss_problems
from rstar2_megatron.settings.schema import AlgorithmSettings
from rstar2_megatron.trajectory import FinishReason, Group, HeldTokens, Problem, ToolCall, ToolOutcome, Trajectory
from tests.algorithm.own import own
from tests.algorithm.tokens import algorithm

OK, MALFORMED = ToolOutcome.OK, ToolOutcome.MALFORMED


def attempt(
    reward: float, turns: list[int], *, outcomes: list[ToolOutcome] | None = None, ending: FinishReason = FinishReason.ANSWERED
) -> Trajectory:
    """turns: generated tokens of each; a tool response of two tokens stands between two turns."""
    calls = [ToolCall("python", {}, outcome, "") for outcome in outcomes or [OK] * (len(turns) - 1)]
    mask = [bit for number, length in enumerate(turns) for bit in [0] * (2 * (number > 0)) + [1] * length]
    return Trajectory(
        "q",
        0,
        prompt_ids=[1, 2, 3],
        response_ids=list(range(len(mask))),
        loss_mask=mask,
        rollout_logprobs=[-0.5 * bit for bit in mask],
        assistant_texts=["a"] * len(turns),
        tool_calls=calls,
        calls_per_turn=[1] * len(calls),
        finish_reason=ending,
        reward=reward,
    )


def overlong(buffer_tokens: int, longest: int, penalty: float = 1.0, **keys: Any) -> AlgorithmSettings:
    return algorithm(
        overlong={"buffer_tokens": buffer_tokens, "penalty": penalty}, sampling_params={"max_new_tokens": longest}, **keys
    )


def by_turn(discount: float, malformed_penalty: float = 0.0, **keys: Any) -> AlgorithmSettings:
    return algorithm(turn_returns={"discount": discount, "malformed_penalty": malformed_penalty}, **keys)


# ------------------------------------------------------------------------------------------------ overlong


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (15, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0)]
)
def test_punishment_by_hand(length: int, expected: float) -> None:
    """L_max 20, L_cache 4."""
    assert punishment(length, overlong(4, 20)) == expected
    assert punishment(length, overlong(4, 20, penalty=0.5)) == expected / 2


def test_punishment_equals_equation_13() -> None:
    for longest in (1, 7, 64):
        for cache in range(1, longest + 1):
            for y in range(longest + 3):
                if y <= longest - cache:
                    expected = 0.0
                elif y <= longest:
                    expected = ((longest - cache) - y) / cache
                else:
                    expected = -1.0
                assert punishment(y, overlong(cache, longest)) == pytest.approx(expected, abs=1e-15)


def test_the_punished_reward_enters_the_mean_of_the_group() -> None:
    """Rewards 1, 1, 0, 0 with 0.5 and 1 taken from the second and the fourth, which have 18 and 20 tokens."""
    group = [attempt(1, [10]), attempt(1, [10, 6]), attempt(0, [10]), attempt(0, [18 - 2, 2])]
    assert [t.response_tokens for t in group] == [10, 18, 10, 20]
    found = advantages_of([group], overlong(4, 20, adv_type="grpo-no-std"))
    mean = (1 + 0.5 + 0 - 1) / 4
    assert found.tolist() == pytest.approx([1 - mean, 0.5 - mean, 0 - mean, -1 - mean])
    assert [t.reward for t in group] == [1, 1, 0, 0], "the graded reward stays, for files, pass rates and evaluation"
    assert overlong_metrics(group, overlong(4, 20)) == {"actor/overlong_punishment": -1.5 / 4}


def test_tokens_that_stay_with_their_worker_count_as_those_that_are_here() -> None:
    here, there = attempt(1, [10, 6]), attempt(1, [10, 6])
    there.held = HeldTokens(0, 0, 3, 18, there.spans, -8.0)
    there.response_ids, there.loss_mask, there.rollout_logprobs = (np.empty(0),) * 3  # type: ignore[assignment]
    for settings in (overlong(4, 20), by_turn(0.9)):
        one, other = (advantages_of([[t, attempt(0, [3, 2])]], settings) for t in (here, there))
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("reject", [True, False])
def test_selection_sees_the_graded_reward(reject: bool) -> None:
    """A right trajectory at the token limit has reward 0 after the punishment, and is a positive all the same.

    A group of right ones of different lengths is rejected as a group of equal reward. Where such groups are kept, their
    advantages are of the lengths alone.
    """
    config = {
        "down_sample_to_n": 2,
        "reject_equal_reward": reject,
        "min_zero_reward_trace_num": 1,
        "min_non_zero_reward_trace_num": 1,
    }
    settings = overlong(4, 20, group_size=4, down_sampling={"down_sampling_config": config})
    long, short = attempt(1, [20]), attempt(1, [10])
    mixed, right = [long, attempt(0, [10]), attempt(0, [9]), attempt(0, [8])], [long, short]
    problem = Problem("q", [], ["1"])
    groups = [Group(problem, mixed), Group(problem, right)]
    first, second = Selection(settings).resample(groups, ["a", "b"])
    assert long in first.kept
    off = Selection(settings.model_copy(update={"overlong": algorithm().overlong})).resample(groups, ["a", "b"])
    assert [one.indices for one in off] == [first.indices, second.indices]
    if reject:
        assert second.reason is Rejection.ALL_CORRECT
    else:
        assert advantages_of([second.kept], settings).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


def test_truncation_filter_and_punishment_go_together() -> None:
    """The filter leaves out what the limit ended; the punishment is for what came near it."""
    cut, near = attempt(0, [20], ending=FinishReason.LENGTH_LIMIT), attempt(1, [18])
    settings = overlong(4, 20, trajectory_filters=["truncated"], down_sampling={"do_down_sampling": False,
                        "down_sampling_config": {"down_sample_to_n": 2}})  # fmt: skip
    (kept,) = Selection(settings).resample([Group(Problem("q", [], ["1"]), [cut, near, attempt(0, [3])])], ["a"])
    assert kept.indices == [1, 2]
    assert overlong_metrics(kept.kept, settings) == {"actor/overlong_punishment": -0.25}


def test_off_is_bit_for_bit_what_it_was() -> None:
    rng = random.Random(0)
    groups = [[attempt(rng.choice([0.0, 1.0, 0.3]), [rng.randint(1, 30)]) for _ in range(rng.randint(1, 7))] for _ in range(5)]
    for kind in ("grpo", "grpo-no-std", "leave-one-out"):
        rows = group_advantages([[t.reward or 0.0 for t in group] for group in groups], kind)
        found = advantages_of(groups, algorithm(adv_type=kind))
        assert found.dtype == np.float64 and found.tolist() == [a for row in rows for a in row]
    assert overlong_metrics(groups[0], algorithm()) == {}
    assert advantages_of([], algorithm()).shape == (0,)


# ------------------------------------------------------------------------------------------------ turns


def test_returns_by_hand() -> None:
    """Three turns, the second with a malformed call: r = 0, -0.1, 1 and a discount of 0.5."""
    t = attempt(1, [4, 3, 2], outcomes=[OK, MALFORMED])
    assert turn_returns(t, by_turn(0.5, 0.1)) == pytest.approx([0.5 * (-0.1 + 0.5), -0.1 + 0.5, 1.0])
    assert turn_returns(t, by_turn(1.0)) == [1.0, 1.0, 1.0]
    ended = attempt(0, [4, 3], outcomes=[MALFORMED], ending=FinishReason.MALFORMED_CALLS)
    assert turn_returns(ended, by_turn(0.5, 0.1)) == pytest.approx([-0.1 - 0.05, -0.1])
    punished = by_turn(0.5, overlong={"buffer_tokens": 4}, sampling_params={"max_new_tokens": 11})
    assert turn_returns(attempt(1, [4, 3]), punished) == [0.25, 0.5], "nine tokens, two in the buffer"


def test_advantages_of_turns_by_hand() -> None:
    """A turn is compared with the same turn of the others; the only one that has a third turn has nothing to compare."""
    group = [attempt(1, [2, 2, 2]), attempt(0, [1, 3]), attempt(1, [5])]
    found = advantages_of([group], by_turn(0.5, adv_type="grpo-no-std"))
    first = [0.25, 0.0, 1.0]
    mean = sum(first) / 3
    expected = [[0.25 - mean, 0.25, 0.0], [-mean, -0.25, 0.0], [1 - mean, 0.0, 0.0]]
    assert found.tolist() == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize("kind", ["grpo", "grpo-no-std", "leave-one-out"])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_turns_equal_a_slow_implementation(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    discount, penalty = rng.choice([0.5, 0.9, 1.0]), rng.choice([0.0, 0.1])
    groups = []
    for _ in range(4):
        lengths = [[rng.randint(1, 4) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 6))]
        groups.append([attempt(rng.choice([0.0, 1.0, 0.4]), turns, outcomes=[rng.choice([OK, MALFORMED]) for _ in turns[1:]])
                       for turns in lengths])  # fmt: skip
    found = advantages_of(groups, by_turn(discount, penalty, adv_type=kind))
    place = 0
    for group in groups:
        tables = []
        for t in group:
            rewards = [-penalty * (call.outcome is MALFORMED) for call in t.tool_calls] + [t.reward or 0.0]
            count = len(rewards)
            tables.append([sum(discount ** (k - j) * rewards[k] for k in range(j, count)) for j in range(count)])
        for table in tables:
            for turn, value in enumerate(table):
                peers = [other[turn] for other in tables if len(other) > turn]
                spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
                centred = value - statistics.fmean(peers)
                if kind == "grpo":
                    centred /= spread + 1e-6
                elif kind == "leave-one-out":
                    centred *= len(peers) / max(len(peers) - 1, 1)
                assert found[place, turn] == pytest.approx(centred, abs=1e-9)
            assert not found[place, len(table) :].any()
            place += 1
    assert place == len(found)


def test_with_one_turn_each_it_is_the_advantage_of_the_trajectory() -> None:
    group = [attempt(reward, [4]) for reward in (1, 0, 0, 0.5)]
    assert advantages_of([group], by_turn(0.5))[:, 0].tolist() == advantages_of([group], algorithm()).tolist()
    same = [attempt(reward, [4, 2]) for reward in (1, 0, 0, 0.5)]
    assert advantages_of([same], by_turn(1.0)).T.tolist() == [advantages_of([same], algorithm()).tolist()] * 2


def test_a_rule_of_the_users_gets_one_turn_of_one_group_as_a_row(tmp_path: Path) -> None:
    rule = own(tmp_path, "def f(rewards, valid): return rewards * 10 + valid.sum(1, keepdim=True)")
    found = advantages_of([[attempt(1, [2, 2]), attempt(0, [1])]], by_turn(0.5, adv_type=rule))
    assert found.tolist() == [[7.0, 11.0], [2.0, 0.0]]


def test_a_batch_gives_each_token_the_advantage_of_its_turn() -> None:
    group = [attempt(1, [2, 1]), attempt(0, [1])]
    advantages = np.array([[0.5, -2.0], [3.0, 0.0]])
    blocks = [TokenBlock.of([train_sequence(t) for t in group])]
    batch = TrainBatch([], np.array([0, 0]), np.array([0, 1]), advantages, 4)
    first, second = batch.sequences(blocks)
    assert np.array_equal(first.advantage, [0, 0, 0, 0.5, 0.5, 0, 0, -2.0])
    assert np.array_equal(second.advantage, [0, 0, 0, 3.0])
    assert batch.select([1]).sequences(blocks) == [second] and first != second


# ------------------------------------------------------------------------------------------------ layouts, refusals


@pytest.mark.parametrize("name", ["clipped", "gspo-token", "cispo"])
def test_losses_with_advantages_of_turns_do_not_depend_on_the_layout(name: str) -> None:
    check_layouts(POLICY_LOSSES[name], by_turn(0.9))


def test_a_loss_that_takes_one_advantage_for_a_sequence_is_found_where_turns_have_their_own(tmp_path: Path) -> None:
    """It takes the mean of those that its rank has. With advantages of trajectories that is right."""
    text = """
def f(tokens):
    of_sequence = tokens.sequence[None] == tokens.sequence[:, None]
    return -(of_sequence * tokens.advantages).sum(1) / of_sequence.sum(1) * tokens.ratio
"""

    def loss(settings: AlgorithmSettings) -> PolicyLoss:
        return load_policy_loss(settings)[0]

    code = own(tmp_path, text)
    check_layouts(loss(algorithm(policy_loss=code)), algorithm(policy_loss=code))
    settings = by_turn(0.9, policy_loss=code)
    with pytest.raises(ValueError, match="context-parallel ranks: it must depend on its own sequence only"):
        check_layouts(loss(settings), settings)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"policy_loss": "gspo", "turn_returns": {"discount": 0.9}},
            ("algorithm.policy_loss=gspo", "algorithm.turn_returns.discount=0.9"),
        ),
        (
            {"turn_returns": {"malformed_penalty": 0.1}},
            ("algorithm.turn_returns.malformed_penalty=0.1", "algorithm.turn_returns.discount=null"),
        ),
        ({"entropy_bonus_tokens": 8}, ("algorithm.entropy_bonus_tokens=8", "algorithm.entropy_bonus=0")),
    ],
)
def test_contradictions_name_both_keys(keys: dict[str, Any], named: tuple[str, str]) -> None:
    (said,) = loss_problems(algorithm(**keys))
    assert all(key in said for key in named)


def test_what_goes_together_is_not_refused() -> None:
    settings = by_turn(0.9, 0.1, policy_loss="gspo-token", entropy_bonus=0.01, entropy_bonus_tokens=8)
    assert not list(loss_problems(settings))
