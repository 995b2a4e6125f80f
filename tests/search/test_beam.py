"""Beam search against brute force, independent attempts, and the choice of an answer."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.search.beam import Attempts, Beam
from rstar2_megatron.search.choose import Solution, best_value, most_frequent, most_valued, solutions
from rstar2_megatron.search.step import Step
from rstar2_megatron.trajectory import FinishReason
from tests.search.scripted import drive, finished, letters, name, settings


@given(st.integers(0, 10_000), st.integers(1, 3))
def test_a_beam_wide_enough_is_brute_force(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    values = {"".join(p): rng.uniform(-1, 1) for p in itertools.product("abc", repeat=depth)}
    search = Beam(settings(depth=depth + 1, beam_width=3**depth))
    drive(search, letters(depth, "abc", values.__getitem__, lambda path: rng.uniform(-1, 1)))
    found = solutions(search.tree, "beam")
    assert sorted(s.value for s in found) == sorted(values.values())
    best = best_value(found)
    assert best is not None and best.value == max(values.values())


def test_the_best_prefixes_stay() -> None:
    """Width 2 of the scores a 0.1, b 0.9, c 0.5: b and c go on, and of their children the two best."""
    score = {"a": 0.1, "b": 0.9, "c": 0.5}
    search = Beam(settings(depth=4, beam_width=2))
    policy = letters(2, "abc", lambda p: score[p[-1]], lambda p: sum(score[x] for x in p) / 2)
    assert drive(search, policy) == ["", "b", "c", "bb", "bc"]
    assert [s.value for s in solutions(search.tree, "beam")] == [0.9, 0.5]


def test_a_finished_beam_lowers_the_width() -> None:
    def policy(path: str) -> list[Step]:
        if not path:
            return [finished("!", 0.9), Step("a", value=0.8), Step("b", value=0.7)]
        return [Step("c", value=0.1), finished("?", 0.2)]

    search = Beam(settings(depth=3, beam_width=2))
    assert drive(search, policy) == ["", "a"]  # one of two places went to the solution
    assert [name(leaf) for leaf in search.tree.leaves() if leaf.kept] == ["!", "a?"]


def test_a_path_without_an_answer_is_not_kept() -> None:
    policy = {"": [Step("a", value=0.9, ending=FinishReason.LENGTH_LIMIT), Step("b", value=0.1)], "b": [finished("!", 0.3)]}
    search = Beam(settings(depth=3, beam_width=1))
    assert drive(search, policy.__getitem__) == ["", "b"]
    assert [node.q for node in search.tree.root.children] == [-1.0, 0.1]


def test_attempts_are_independent_and_equal_ones_stay_apart() -> None:
    search = Attempts(settings(rollouts=4, depth=3))
    sizes = []
    while wanted := search.wanted():
        for node in wanted:
            sizes.append(search.candidates(node))
            done = node.depth == 1
            search.grow(node, [finished("!", 1.0, 1.0) if done else Step("a") for _ in range(sizes[-1])])
    assert sizes == [4, 1, 1, 1, 1]
    assert len(solutions(search.tree, "sampling")) == 4 and search.tree.root.visits == 4


def same(a: str, b: str) -> bool:
    return a == b


def test_choices() -> None:
    found = [
        Solution("0.1", "3", 0.2, 0.0),
        Solution("0.2", "5", 0.9, 1.0),
        Solution("0.3", "3", 0.0, 0.0),
        Solution("0.4", None, 1.0, 0.0),
        Solution("0.5", "3.0", -0.9, 0.0),
    ]
    best, votes, valued = best_value(found), most_frequent(found, same), most_valued(found, same)
    assert best is not None and best.tag == "0.4"
    assert votes is not None and votes.answer == "3"  # 3 and 3.0 are one number
    # 0.6 + 0.5 + 0.05 against 0.95
    assert valued is not None and valued.answer == "3"
    assert most_valued(found[:2], same) == found[1]
    assert best_value([]) is None and most_frequent([], same) is None and most_valued([], same) is None
    assert most_frequent([Solution("0.1", "3", 0, 0), Solution("0.2", "5", 0, 1, copies=2)], same).answer == "5"  # type: ignore[union-attr]


@pytest.mark.parametrize("field", ["depth", "candidates", "rollouts", "beam_width"])
def test_zero_is_no_size(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        settings(**{field: 0})
