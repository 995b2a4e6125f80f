"""Preference pairs, on trees worked out by hand."""

from __future__ import annotations

import random

import pytest

from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.preference.pairs import NodePairs, differ, pairs_of, verdict
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree import End, Node, Tree
from rstar2_megatron.settings.schema import PreferenceSettings
from rstar2_megatron.trajectory import FinishReason, ToolCall, ToolOutcome
from tests.search.scripted import drive, finished, letters, name, settings

FAILED = [ToolCall("python", {}, ToolOutcome.ERROR, "no")]


def rules(**values: object) -> PreferenceSettings:
    return PreferenceSettings.model_validate({"min_distance": 1, "whole_solutions": False, **values})


def node(text: str, parent: Node, q: float, end: End | None = None, reward: float | None = None) -> Node:
    """A child with N = 1, so that Q is `q`."""
    parent.children = parent.children or []
    child = Node(f"{parent.tag}.{len(parent.children) + 1}", parent.depth + 1, parent)
    child.step = Step(text, reward=reward, ending=FinishReason.ANSWERED if end is End.ANSWER else None)
    child.visits, child.total, child.end = 1, q, end
    parent.children.append(child)
    return child


def right(text: str, parent: Node) -> Node:
    return node(text, parent, 1.0, End.ANSWER, 1.0)


def wrong(text: str, parent: Node) -> Node:
    return node(text, parent, -1.0, End.ANSWER, 0.0)


def shown(comparison: NodePairs) -> tuple[list[str], list[str], list[tuple[int, int]]]:
    return [name(n) for n in comparison.better], [name(n) for n in comparison.worse], comparison.pairs


def test_two_best_against_two_worst_by_q() -> None:
    """Q 0.9, 0.6, 0.5 lead right, -0.8, -0.6, -0.2 wrong: the middle ones stay out."""
    tree = Tree()
    for text, q in (("a", 0.5), ("b", 0.9), ("c", 0.6)):
        right("!", node(text, tree.root, q))
    for text, q in (("d", -0.2), ("e", -0.8), ("f", -0.6)):
        wrong("?", node(text, tree.root, q))
    (comparison,) = pairs_of(tree, rules())
    assert shown(comparison) == (["b", "c"], ["e", "f"], [(0, 0), (0, 1), (1, 0), (1, 1)])
    (comparison,) = pairs_of(tree, rules(best=1))
    assert shown(comparison) == (["b"], ["e"], [(0, 0)])


def test_a_single_candidate_meets_four_of_the_other_side() -> None:
    tree = Tree()
    right("!", node("a", tree.root, 0.9))
    for text, q in zip("bcdef", (-0.1, -0.2, -0.3, -0.4, -0.5)):
        wrong("?", node(text, tree.root, q))
    (comparison,) = pairs_of(tree, rules())
    assert shown(comparison) == (["a"], ["f", "e", "d", "c"], [(0, j) for j in range(4)])


def test_a_pair_needs_its_margin() -> None:
    """0.6 - 0.2 is too little; and a node that no pair uses is not scored."""
    tree = Tree()
    right("!", node("a", tree.root, 0.6))
    right("!", node("b", tree.root, 0.3))
    wrong("?", node("c", tree.root, 0.2))
    wrong("?", node("d", tree.root, -0.1))
    (comparison,) = pairs_of(tree, rules())
    assert shown(comparison) == (["a"], ["d"], [(0, 0)])
    assert pairs_of(tree, rules(min_margin=0.8)) == []


def test_a_child_on_both_sides_needs_the_better_continuation() -> None:
    """Both children lead right and wrong. a: Q 0.5, best continuation 0.75, worst -0.25; b: 0, 0.5, -0.5."""
    tree = Tree()
    for text, q in (("a", 0.5), ("b", 0.0)):
        child = node(text, tree.root, q)
        right("!", child)
        wrong("?", child)
    comparisons = pairs_of(tree, rules())
    assert [shown(c) for c in comparisons] == [
        (["a"], ["b"], [(0, 0)]),  # never b over a, and never a over itself
        (["a!"], ["a?"], [(0, 0)]),
        (["b!"], ["b?"], [(0, 0)]),
    ]
    # a's only right answer was found after a costly detour: its best continuation is below the worst of b
    tree = Tree()
    a, b = node("a", tree.root, 0.9), node("b", tree.root, 0.1)
    step = node("x", a, -1.0)
    right("!", node("y", step, -1.0))  # mean of 0.9, -1, -1, 1 is -0.025
    wrong("?", node("z", b, 1.0))  # mean of 0.1, 1, -1 is 0.033
    assert pairs_of(tree, rules()) == []


def test_dead_ends_are_wrong_unless_a_call_failed() -> None:
    tree = Tree()
    right("!", tree.root)
    deep, long = (node(text, tree.root, -1.0, end) for text, end in (("d", End.DEPTH), ("l", End.LIMIT)))
    failed, unseen = node("e", tree.root, -1.0, End.ERRORS), node("u", tree.root, 0.0)
    broken = node("f", tree.root, -1.0, End.DEPTH)
    assert broken.step is not None
    broken.step.tool_calls = FAILED
    assert [verdict(n) for n in (deep, long, failed, unseen, broken)] == [False, False, None, None, None]
    (comparison,) = pairs_of(tree, rules())
    assert shown(comparison) == (["!"], ["d", "l"], [(0, 0), (0, 1)])


def test_texts_must_differ() -> None:
    tree = Tree()
    right("x = 1234", tree.root)
    wrong("x = 1235", tree.root)
    wrong("y = 5678", tree.root)
    assert shown(pairs_of(tree, rules(min_distance=2))[0]) == (["x = 1234"], ["y = 5678"], [(0, 0)])
    assert pairs_of(tree, rules(min_distance=20)) == []


def test_whole_solutions_by_mean_q() -> None:
    """Right a! (0.9), b! (0.7), c! (0.5); wrong d? (-0.9), e? (-0.5), f? (-0.3): two of each, from any prefixes."""
    tree = Tree()
    for text, q in (("a", 0.8), ("b", 0.4), ("c", 0.0)):
        right("!", node(text, tree.root, q))
    for text, q in (("d", -0.8), ("e", 0.0), ("f", 0.4)):
        wrong("?", node(text, tree.root, q))
    found = pairs_of(tree, rules(whole_solutions=True))
    assert [shown(c) for c in found] == [
        (["a", "b"], ["d", "e"], [(0, 0), (0, 1), (1, 0)]),  # b over e: margin 0.4
        (["a!", "b!"], ["d?", "e?"], [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ]
    # siblings that are compared already are not compared again
    tree = Tree()
    right("!", tree.root)
    wrong("?", tree.root)
    assert [shown(c) for c in pairs_of(tree, rules(whole_solutions=True))] == [(["!"], ["?"], [(0, 0)])]


def test_pairs_of_a_searched_tree() -> None:
    """The golden trace: ac, bd wrong, ad, bc right; a and b tie at Q 0, so only the second steps are compared."""
    search = MCTS(settings(rollouts=6))
    drive(search, letters(2, "ab", lambda path: 1.0 if path in ("ab", "ba") else -1.0, lambda path: None))
    found = [shown(c) for c in pairs_of(search.tree, rules())]
    assert found == [(["ab"], ["aa"], [(0, 0)]), (["ba"], ["bb"], [(0, 0)])]
    whole = pairs_of(search.tree, rules(whole_solutions=True))[-1]
    assert shown(whole) == (["ab!", "ba!"], ["bb!", "aa!"], [(0, 0), (0, 1), (1, 0), (1, 1)])


def test_nothing_to_compare() -> None:
    tree = Tree()
    assert pairs_of(tree, rules(whole_solutions=True)) == []
    right("!", tree.root)
    right("+", tree.root)
    assert pairs_of(tree, rules(whole_solutions=True)) == []


def levenshtein(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@pytest.mark.parametrize("seed", range(5))
def test_distances_equal_the_whole_table(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        a = "".join(rng.choices("abc", k=rng.randint(0, 30)))
        b = list(a)
        for _ in range(rng.randint(0, 12)):
            b.insert(rng.randint(0, len(b)), rng.choice("abc"))
            del b[rng.randrange(len(b))]
        for least in (0, 1, 2, 5, 10, 40):
            assert differ(a, "".join(b), least) == (levenshtein(a, "".join(b)) >= least)


def test_an_answer_is_judged_by_its_reward() -> None:
    """Not by its Q: under a scorer a right answer's leaf may have any."""
    tree = Tree()
    low, high = node("a", tree.root, -0.9, End.ANSWER, 1.0), node("b", tree.root, 0.9, End.ANSWER, 0.0)
    assert verdict(low) is True and verdict(high) is False
    assert pairs_of(tree, rules()) == []
    assert finished("!", None, 1.0).answered
