"""Advantages, filters, resampling rules and penalties of the user's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.algorithm.advantage import check_own_advantage, group_advantages
from rstar2_megatron.algorithm.penalty import Penalty, load_penalty
from rstar2_megatron.algorithm.roc import Rejection, resample_on_correct
from rstar2_megatron.algorithm.selection import Selection
from rstar2_megatron.extension.user_code import UserCodeError
from rstar2_megatron.trajectory import FinishReason, Group, Problem, Trajectory
from tests.algorithm.own import own
from tests.algorithm.tokens import algorithm
from tests.algorithm.trajectories import num_kept_positive

REWARDS = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def group(rewards: list[float] = REWARDS, number: int = 0) -> Group:
    problem = Problem(f"q{number}", [{"role": "user", "content": "?"}], ["1"], extra={"level": number})
    made = [
        Trajectory(problem.query_id, i, [1], [2] * (i + 1), [1] * (i + 1), [-1.0] * (i + 1), reward=reward,
                   finish_reason=FinishReason.ANSWERED)
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return Group(problem, made)


def select(groups: list[Group], down: bool = True, **keys: Any) -> list[Any]:
    filters = keys.pop("trajectory_filters", [])
    least = {"min_zero_reward_trace_num": 0, "min_non_zero_reward_trace_num": 0}
    sampling = {"do_down_sampling": down, "down_sampling_config": {"down_sample_to_n": 4, **least, **keys}}
    settings = algorithm(group_size=6, down_sampling=sampling, trajectory_filters=filters)
    return Selection(settings).resample(groups, [f"1-{g.problem.query_id}" for g in groups])


def test_an_own_advantage(tmp_path: Path) -> None:
    code = own(tmp_path, "def f(rewards, valid):\n    return (rewards - 0.5) * 2")
    assert group_advantages([[1.0, 0.0], [], [1.0]], code) == [[1.0, -1.0], [], [1.0]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return rewards[0]", r"returned the shape \(2,\); return a tensor \[groups, G\] of shape \(1, 2\)"),
        ("return [0.0]", r"returned a list; return a tensor"),
        ("return rewards / 0", r"returned \[inf, nan\] for the rewards \[1.0, 0.0\]"),
        ("raise KeyError('k')", r"failed: .*own.py:2, in f: KeyError: 'k'"),
    ],
)
def test_wrong_advantages_are_one_sentence(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(UserCodeError, match=r"algorithm.adv_type=own.py:f " + said):
        group_advantages([[1.0, 0.0]], own(tmp_path, f"def f(rewards, valid):\n    {body}"))


def test_advantages_of_swapped_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"takes \(valid, rewards\), .* name them \(rewards, valid\), in this order"):
        check_own_advantage(own(tmp_path, "def f(valid, rewards):\n    return rewards"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("rewards - rewards.mean(1, keepdim=True)", r"for the rewards \[0.0, 1.0, 0.0\], valid \[True, True, False\], and"),
        ("(rewards - 0.5) / rewards.std(1, keepdim=True)", r"\[-inf, -inf, -inf\] for the rewards \[0.0, 0.0, 0.0\]"),
        ("torch.where(valid, rewards, 0.0) / (valid.sum(1, keepdim=True) - 1)", r"\[inf\] for the rewards \[1.0\] of a group"),
    ],
)
def test_what_is_not_valid_and_equal_rewards_are_tried_before_a_run(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(UserCodeError, match=r"algorithm.adv_type=own.py:f returned .*" + said):
        check_own_advantage(own(tmp_path, f"import torch\ndef f(rewards, valid):\n    return {body}"))


@pytest.mark.parametrize(
    "body",
    [
        "return torch.where(valid, rewards - rewards[valid].mean(), 0.0)",  # over the whole batch
        "rewards[~valid] = 0\n    return rewards + torch.rand_like(rewards)",  # in place, by chance
    ],
)
def test_advantages_that_leave_out_what_is_not_valid_pass(tmp_path: Path, body: str) -> None:
    check_own_advantage(own(tmp_path, f"import torch\ndef f(rewards, valid):\n    {body}"))


def test_an_own_advantage_gets_no_rejected_group(tmp_path: Path) -> None:
    """It has no rewards, of which no minimum can be taken."""
    body = "import torch\ndef f(rewards, valid): return torch.stack([r - r[v].min() for r, v in zip(rewards, valid)])"
    assert group_advantages([[], [1.0, 0.0], [], [2.0]], own(tmp_path, body)) == [[], [1.0, 0.0], [], [0.0]]
    assert group_advantages([[], []], own(tmp_path, body)) == [[], []]


def test_without_rules_of_the_users_it_is_resample_on_correct() -> None:
    groups = [group(), group([1.0] * 6, 1), group([0.0, 1.0], 2)]
    config = algorithm(
        down_sampling={
            "down_sampling_config": {"down_sample_to_n": 4, "min_zero_reward_trace_num": 0, "min_non_zero_reward_trace_num": 0}
        }
    ).down_sampling.down_sampling_config
    assert select(groups) == resample_on_correct([g.usable for g in groups], config, ["1-q0", "1-q1", "1-q2"])


def test_filters_come_before_resampling_and_are_counted(tmp_path: Path) -> None:
    """Indices still count the usable trajectories; a group whose rest has equal rewards is rejected."""
    text = "def f(problem, trajectory):\n    return trajectory.rollout_index not in problem.extra.get('bad', [0, 3])"
    code = own(tmp_path, text)
    first, second = group(), group(number=1)
    second.problem.extra["bad"] = [0, 1, 3]
    one, two = select([first, second], trajectory_filters=[code])
    assert one.filtered == {"f": 2} and two.filtered == {"f": 3}
    assert one.indices == [1, 2, 4, 5] and [t.rollout_index for t in one.kept] == [1, 2, 4, 5]
    assert (num_kept_positive(one), len(one.penalties)) == (1, 6)
    assert two.reason is Rejection.ALL_WRONG and two.kept == []
    (whole,) = select([first], down=False, trajectory_filters=[code])
    assert whole.indices == [1, 2, 4, 5] and whole.filtered == {"f": 2}


def test_without_down_sampling_everything_is_kept() -> None:
    (whole,) = select([group([1.0, 0.0, 1.0])], down=False)
    assert whole.indices == [0, 1, 2] and num_kept_positive(whole) == 2 and not whole.rejected
    (equal, empty) = select([group([1.0] * 3), group([])], down=False)
    assert not equal.rejected and empty.reason is Rejection.TOO_FEW


def test_the_first_trajectory_left_out_decides_no_rejection(tmp_path: Path) -> None:
    """Rewards are compared among those that stay."""
    code = own(tmp_path, "def f(problem, trajectory):\n    return trajectory.rollout_index > 0")
    (result,) = select([group([0.0, 1.0, 1.0, 1.0])], trajectory_filters=[code])
    assert result.reason is Rejection.ALL_CORRECT


def test_an_own_rule_keeps_what_it_says(tmp_path: Path) -> None:
    rule = "def f(group, count, rng):\n    assert group.problem.extra\n    return rng.sample(range(6), count)"
    groups = [group([0.0, 1.0] * 3, number) for number in range(1, 5)]
    results = select(groups, mode=own(tmp_path, rule))
    assert all(len(result.kept) == 4 for result in results) and len({tuple(r.indices) for r in results}) > 1
    assert select(groups[1:2], mode=own(tmp_path, rule))[0].indices == results[1].indices  # whatever else is in the step
    filtered = select(
        groups,
        mode=own(tmp_path, "def f(group, count, rng): return [0]\ndef keep(problem, t): return t.rollout_index > 1"),
        trajectory_filters=[own(tmp_path, (tmp_path / "own.py").read_text(), "keep")],
    )
    assert [result.indices for result in filtered] == [[2]] * 4
    in_place = "import numpy\ndef f(group, count, rng):\n    group.trajectories.reverse()\n    return numpy.array([0, 1])"
    (last,) = select(groups[:1], mode=own(tmp_path, in_place))
    assert last.indices == [4, 5] and [t.rollout_index for t in last.kept] == [4, 5]
    assert select(groups[:1], mode=own(tmp_path, "def f(group, count, rng): yield 5"))[0].indices == [5]
    (none,) = select([group()], mode=own(tmp_path, "def f(group, count, rng): return []"))
    assert none.reason is Rejection.TOO_FEW and none.kept == []


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("mode", "def f(group, count, rng): return [9]", r"returned \[9\] for a group of 6; indices count group.trajectories"),
        ("mode", "def f(group, count, rng): return range(5)", r"kept 5 trajectories, more than down_sample_to_n=4"),
        ("mode", "def f(group, count, rng): return None", r"returned None; return a list of indices"),
        ("mode", "def f(group, count, rng): return [True, False]", r"returned \[True, False\]; return a list of indices"),
        ("mode", "def f(group, count, rng): return [0.9]", r"returned \[0.9\]; return a list of indices"),
        ("mode", "def f(group): return [0]", r"is called by \(group, count, rng\): .*write def f\(group, count, rng\)"),
        ("mode", "async def f(group, count, rng): return [0]", r"it is async; write it as a plain `def`"),
        ("penalty", "class f:\n    def __init__(self, trajectory): ...", r"it is a class; make an instance, `name = f\(...\)`"),
        ("trajectory_filters", "def f(trajectory, problem): return True", r"name them \(problem, trajectory\), in this order"),
        ("penalty", "def f(trajectory): return -1", r"returned -1; a penalty is finite and at least 0"),
        ("penalty", "def f(trajectory): return 'x'", r"returned a str; return a number or a Penalty"),
        ("trajectory_filters", "def f(problem, trajectory): return 1", r"own.py:f returned a int; return True or False"),
        ("trajectory_filters", "def f(problem, trajectory): return 1 / 0", r"failed: .*own.py:1, in f: ZeroDivisionError"),
    ],
)
def test_wrong_rules_are_one_sentence(tmp_path: Path, key: str, text: str, said: str) -> None:
    code = own(tmp_path, text)
    with pytest.raises(UserCodeError, match=said):
        select([group()], **{key: [code] if key == "trajectory_filters" else code})


def test_numbers_and_truths_of_numpy_count(tmp_path: Path) -> None:
    own_penalty = own(tmp_path, "import numpy\ndef f(trajectory): return numpy.float32(0.5)")
    answered = replace(group().trajectories[0], assistant_texts=["<answer>1</answer>", "<answer>2</answer>"])
    assert load_penalty(own_penalty)(answered) == Penalty(0.5, 0.0, 2)
    own_filter = own(tmp_path, "import numpy\ndef f(problem, trajectory): return numpy.float32(trajectory.rollout_index) < 4")
    (result,) = select([group()], trajectory_filters=[own_filter])
    assert result.filtered == {"f": 2}


def test_an_own_penalty_decides_who_stays(tmp_path: Path) -> None:
    """Of four positives two stay: those of the lowest penalty in released mode."""
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    code = own(tmp_path, "def f(trajectory): return 10 - trajectory.rollout_index")
    (result,) = select([group(rewards)], mode="released", penalty=code)
    assert result.indices == [2, 3, 4, 5] and result.penalties[3] == Penalty(7.0, 0.0, 0)
    (paper,) = select([group(rewards)], mode="released", penalty="paper")
    assert paper.penalties[0] == Penalty(0.5, 1.0, 0)
