from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.algorithm.advantage import ADVANTAGES, group_advantages


@given(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=2, max_size=32))
def test_advantages_equal_slow_reference(rewards: list[float]) -> None:
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (deviation + 1e-6) for r in rewards]
    assert group_advantages([rewards])[0] == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=16))
def test_leave_one_out_compares_with_the_others(rewards: list[int]) -> None:
    expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    (got,) = group_advantages([[float(r) for r in rewards]], "leave-one-out")
    assert got == pytest.approx(expected, abs=1e-12)


def test_by_hand() -> None:
    # 1 of 4 correct: mean 0.25, unbiased std 0.5
    assert group_advantages([[1, 0, 0, 0]])[0] == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert group_advantages([[1, 0, 0, 0]], "grpo-no-std") == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize("rewards", [[1.0], [], [0.1] * 7, [1.0] * 3])
def test_no_comparison_no_advantage(rewards: list[float]) -> None:
    """0.1 x 7 has a mean that differs from 0.1 by rounding, which must not become an advantage."""
    assert group_advantages([rewards]) == [[0.0] * len(rewards)]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"adv_type=gae: expected grpo"):
        group_advantages([[1.0, 0.0]], "gae")
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages([[1.0, float("nan")]])


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.5]), max_size=8), max_size=5), st.sampled_from(list(ADVANTAGES)))
def test_groups_of_different_sizes_do_not_touch_each_other(groups: list[list[float]], kind: str) -> None:
    together = group_advantages(groups, kind)
    assert together == [pytest.approx(group_advantages([g], kind)[0], abs=1e-12) for g in groups]
