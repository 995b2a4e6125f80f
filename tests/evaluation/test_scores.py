"""avg@k, pass@j, majority@k and their intervals against definitions and enumerations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.evaluation.__main__ import render
from rstar2_megatron.evaluation.scores import estimate, majority, pass_at_j, same_answer, score, score_by, wilson
from tests.evaluation.rows import attempt


@given(st.integers(1, 9), st.data())
def test_pass_at_j_is_the_share_of_subsets_with_a_right_one(n: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, n))
    j = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([i < right for i in range(n)], j))
    assert pass_at_j(n, right, j) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "right", "j"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_j_of_impossible_counts_is_an_error(n: int, right: int, j: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{j} of {n}"):
        pass_at_j(n, right, j)


def vote(*attempts: tuple[str | None, bool]) -> float:
    return majority([attempt("q", i, answer, right) for i, (answer, right) in enumerate(attempts)], same_answer)


def test_majority_counts_answers_that_mean_the_same() -> None:
    assert vote(("0.5", True), ("\\frac{1}{2}", True), ("3", False)) == 1.0
    assert vote(("3", False), ("3.0", False), ("4", True)) == 0.0
    # 1/2 and 50% do not look alike, the grader says they are one
    assert vote(("50\\%", True), ("\\frac12", True), ("7", False), ("8", False)) == 1.0


def test_rewards_of_the_users_have_a_mean_and_without_answers_no_majority() -> None:
    """A vote of nobody would be 0, whatever the model can do."""
    rows = [attempt("a", 0, None, True), attempt("a", 1, None, False), attempt("b", 0, None, True), attempt("b", 1, None, True)]
    rewards = [dataclasses.replace(row, reward=reward) for row, reward in zip(rows, (2.5, -0.5, 0.5, 0.5), strict=True)]
    scores = score(rewards, 2)
    assert scores.majority is None and scores.reward == 0.75 and scores.average.value == 0.75
    metrics = scores.metrics()
    assert metrics["reward"] == 0.75 and not [name for name in metrics if name.startswith("majority")]
    wrong = score([dataclasses.replace(row, positive=False, reward=0.0) for row in rows], 2)
    assert wrong.majority is not None and wrong.majority.value == 0.0  # a model that answers nothing
    higher = score([dataclasses.replace(row, reward=3.0) for row in rows], 2)
    table = render({"games": higher})
    assert re.search(r"mean reward +3\.000", table) and re.search(r"majority@2 +-", table)
    assert "mean reward" not in render({"math": wrong})


def test_majority_at_a_tie_is_the_share_of_right_winners() -> None:
    assert vote(("1", False), ("4", True)) == 0.5
    assert vote(("1", False), ("2", False), ("4", True)) == pytest.approx(1 / 3)


def test_attempts_without_an_answer_do_not_vote() -> None:
    assert vote((None, False), (None, False), ("4", True)) == 1.0
    assert vote((None, False)) == 0.0


def test_interval_covers_as_often_as_it_says() -> None:
    """Of 200 evaluations of 60 problems whose success probabilities are uniform, about 95 % cover 1/2."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        chances = rng.random(60)
        interval = estimate(list(rng.binomial(8, chances) / 8))
        covered += interval.low <= 0.5 <= interval.high
    # the bootstrap is a little narrow with 60 problems: 93 %; six standard deviations of the count below that
    assert 168 <= covered <= 199


def test_interval_of_equal_scores_is_wilsons() -> None:
    all_right = estimate([1.0] * 30)
    assert (all_right.value, all_right.high) == (1.0, pytest.approx(1.0))
    assert all_right.low == pytest.approx(30 / (30 + 1.959964**2))  # solved by hand for share 1
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # textbook value


def test_scores_by_hand() -> None:
    samples = [
        attempt("a", 0, "4", True),
        attempt("a", 1, "5", False, response_tokens=20, trained_tokens=20),
        attempt("b", 0, "4", True, turns=["x"], tool_calls=[{"outcome": "ok"}, {"outcome": "timeout"}]),
        attempt("b", 1, "4", True, tool_calls=[{"outcome": "infrastructure"}], finish_reason="length_limit"),
        attempt("c", 0, None, False, finish_reason="infrastructure"),
        attempt("c", 1, None, False, finish_reason="turn_limit", tool_calls=[{"outcome": "error"}]),
    ]
    scores = score(samples, 2, num_problems=4)
    assert scores.average.value == pytest.approx((0.5 + 1 + 0) / 3)
    assert scores.pass_at[1].value == pytest.approx(scores.average.value)
    assert set(scores.pass_at) == {1}  # c has one attempt: of a and b alone pass@2 would be that of the easy ones
    assert scores.majority.value == pytest.approx((0.5 + 1 + 0) / 3)
    assert scores.missing == 4 * 2 - 5
    assert scores.run_deviation == pytest.approx(statistics.stdev([1.0, 1 / 3]))
    assert scores.tools["tool_calls"] == pytest.approx(3 / 5)
    assert scores.tools["tool_error_ratio"] == pytest.approx(2 / 3)
    assert scores.tools["tool_error_ratio_positive"] == pytest.approx(1 / 2)
    assert scores.tools["no_tool_ratio"] == pytest.approx(3 / 5)
    assert scores.lengths["response_length"] == pytest.approx((10 * 4 + 20) / 5)
    assert scores.lengths["generated_length"] == pytest.approx((8 * 4 + 20) / 5)
    assert scores.endings["length_limit"] == pytest.approx(1 / 5)
    metrics = scores.metrics()
    assert metrics["majority@2"] == scores.majority.value and "pass@2" not in metrics
    json.dumps(metrics)
    whole = score(samples[:4], 2)
    assert whole.pass_at[2].value == 1.0 and whole.metrics()["pass@2"] == 1.0
    row = next(line.split() for line in render({"cut": scores, "whole": whole}).splitlines() if line.startswith("pass@2"))
    assert row[1] == "-" and row[2] == "100.0"


def test_parts_are_scored_apart() -> None:
    samples = [attempt("a", 0, "4", True), attempt("b", 0, "5", False)]
    parts = score_by(samples, {"a": "aime24", "b": "math500", "c": "math500"}, 1)
    assert parts["aime24"].average.value == 1.0
    assert parts["math500"].average.value == 0.0 and parts["math500"].missing == 1
    assert parts["aime24"].run_deviation is None


def test_nothing_usable_is_an_error() -> None:
    with pytest.raises(ValueError, match="spoiled by infrastructure"):
        score([attempt("a", 0, None, False, finish_reason="infrastructure")], 1)
