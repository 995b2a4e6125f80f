"""MCTS against golden traces of the released code, an exhaustive tree, and a slow recomputation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.search.mcts import MCTS, uct
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree import End, Node
from rstar2_megatron.trajectory import FinishReason, ToolCall, ToolOutcome
from tests.search.scripted import Policy, drive, finished, letters, name, settings

RIGHT = {"ad", "bc"}


def two_steps(path: str) -> list[Step]:
    """a or b, then c or d, then an answer; ad and bc are right."""
    if len(path) == 2:
        return [finished("!", 1.0 if path in RIGHT else -1.0)]
    return [Step(letter) for letter in ("ab" if not path else "cd")]


def scored_steps(path: str) -> list[Step]:
    steps = two_steps(path)
    for step in steps:
        if not step.answered:
            step.value = -0.25 if (path + step.text).startswith("a") else 0.5
    return steps


def figures(search: MCTS) -> dict[str, tuple[float, int]]:
    return {name(n): (round(n.q, 4), n.visits) for n in search.tree.root.walk() if "!" not in name(n)}


def finds(search: MCTS) -> list[str]:
    """The solutions that each finished rollout found, - for none."""
    by_tag = {node.tag: name(node).removesuffix("!") for node in search.tree.root.walk()}
    return [",".join(by_tag[tag] for tag in tags) or "-" for tags in search.found[: search.rollouts]]


# Q and N after 6 rollouts of the released agents on these policies (facts of b3c1846).
@pytest.mark.parametrize(
    ("policy", "order", "golden"),
    [
        (
            two_steps,
            ["ac", "bc", "bd", "-", "ad", "-"],
            {"": (0, 4), "a": (0, 2), "b": (0, 2), "ac": (-1, 1), "ad": (1, 1), "bc": (1, 1), "bd": (-1, 1)},
        ),
        (
            scored_steps,
            ["bc", "bd", "ac", "-", "ad", "-"],
            {
                "": (0, 4), "a": (-0.0833, 3), "b": (0.1667, 3),
                "ac": (-0.625, 2), "ad": (0.375, 2), "bc": (0.75, 2), "bd": (-0.25, 2),
            },
        ),
    ],
)  # fmt: skip
def test_released_rules_give_the_golden_traces(policy: Policy, order: list[str], golden: dict[str, tuple[float, int]]) -> None:
    search = MCTS(settings(rules="released", rollouts=6))
    drive(search, policy)
    assert finds(search) == order
    assert figures(search) == golden


def test_papers_rules_waste_no_rollout() -> None:
    """The same trees and values; exhaustion reaches the root at once, so four rollouts do."""
    search = MCTS(settings(rollouts=6))
    drive(search, two_steps)
    assert finds(search) == ["ac", "bc", "bd", "ad"] and search.tree.root.end is End.EXHAUSTED
    released = MCTS(settings(rules="released", rollouts=6))
    drive(released, two_steps)
    assert figures(search) == figures(released)


@pytest.mark.parametrize(("rollouts", "answers"), [(8, 8), (16, 13), (48, 27)])
def test_released_rules_on_three_times_three_times_three(rollouts: int, answers: int) -> None:
    """The page's counts, of a policy without a right answer."""
    search = MCTS(settings(rules="released", rollouts=rollouts, depth=4))
    expanded = drive(search, letters(3, "abc", lambda path: -1.0, lambda path: None))
    assert len(search.tree.leaves()) == answers
    assert len(expanded) == len(set(expanded))


def test_exhaustive_tree() -> None:
    """27 leaves, 40 expansions, each prefix once; the root's q is the sum of the rewards."""
    rng = random.Random(1)
    rewards = {a + b + c: rng.choice([-1.0, 1.0]) for a in "abc" for b in "abc" for c in "abc"}
    search = MCTS(settings(rollouts=1000, depth=4))
    expanded = drive(search, letters(3, "abc", rewards.__getitem__, lambda path: None))
    root = search.tree.root
    assert len(search.tree.leaves()) == 27 and search.tree.expansions == len(set(expanded)) == 40
    assert root.visits == 27 and root.total == sum(rewards.values()) and root.end is End.EXHAUSTED


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """A random tree: each prefix has candidates that answer, go on, fail at a tool, or end without an answer."""
    seed = draw(st.integers(0, 10_000))
    scored = draw(st.booleans())

    def propose(path: str) -> list[Step]:
        rng = random.Random(f"{seed} {path}")
        steps = []
        for _ in range(rng.randint(1, 4)):
            text, kind = rng.choice("abcd"), rng.random()
            if kind < 0.3:
                steps.append(finished(text.upper(), rng.choice([-1.0, 1.0])))
                continue
            step = Step(text, value=rng.uniform(-1, 1) if scored else None)
            if kind < 0.5:
                step.tool_calls = [ToolCall("python", {}, ToolOutcome.ERROR, "Error: no")]
            elif kind < 0.55:
                step.ending = FinishReason.LENGTH_LIMIT
            steps.append(step)
        return steps

    return propose


@given(policies(), st.integers(1, 40), st.integers(1, 5), st.sampled_from(["paper", "released"]), st.integers(1, 3))
def test_values_equal_a_slow_recomputation(policy: Policy, rollouts: int, depth: int, rules: str, threshold: int) -> None:
    """N and q from the list of solutions and the nodes' own scores alone."""
    search = MCTS(settings(rollouts=rollouts, depth=depth, rules=rules, errors_threshold=threshold))
    expanded = drive(search, policy)
    assert len(expanded) == len(set(expanded))
    nodes = list(search.tree.root.walk())
    leaves = search.tree.leaves()
    for node in nodes:
        values = [leaf.step.value for leaf in leaves if node in (search.tree.root, *leaf.path)]
        if node.step is not None and node.end is not End.ANSWER:
            if node.end in (End.ERRORS, End.LIMIT) or (node.end is End.DEPTH):
                values.append(-1.0)
            elif node.step.value is not None:
                values.append(node.step.value)
        assert node.visits == len(values) and node.total == pytest.approx(sum(values))
        assert node.depth <= depth
        below = [child.end is not None for child in node.children or []]
        if rules == "paper" and below:
            assert (node.end is End.EXHAUSTED) == all(below)
    if rules == "paper":  # every rollout but those that the depth cuts off finds a solution or a dead end
        texts = [[c.step.text for c in n.children] for n in nodes if n.children]
        assert all(len(t) == len(set(t)) for t in texts)
    assert search.rollouts <= rollouts


def test_scores_are_the_pages() -> None:
    assert uct(Node("0.1"), 7, 2.0) == 0.0  # unvisited: 0, not infinity
    child = Node("0.1", visits=2, total=1.0)
    assert uct(child, 0, 2.0) == 0.5
    assert uct(child, 3, 2.0) == pytest.approx(0.5 + 2 * (1.0986122887 / 2) ** 0.5)


def mixed(path: str) -> list[Step]:
    if path:
        return [finished("y", 1.0)]
    printed = ToolCall("python", {}, ToolOutcome.OK, "Tool call success\nstdout: standard error 0.3")
    return [Step("s", tool_calls=[printed]), finished("x", -1.0), finished("z", 1.0), Step("t"), Step("t")]


def test_rules_differ_where_the_page_says() -> None:
    """released keeps the first finished solution alone; paper keeps all, and merges equal texts."""
    released = MCTS(settings(rules="released", rollouts=1))
    drive(released, mixed)
    assert [c.step.text for c in released.tree.root.children] == ["x"]
    paper = MCTS(settings(rollouts=1))
    drive(paper, mixed)
    children = paper.tree.root.children
    assert [(c.step.text, c.copies) for c in children] == [("s", 1), ("x", 1), ("z", 1), ("t", 2)]


@pytest.mark.parametrize(("rules", "end"), [("paper", None), ("released", End.ERRORS)])
def test_the_word_error_counts_only_as_released(rules: str, end: End | None) -> None:
    search = MCTS(settings(rules=rules, rollouts=1, errors_threshold=1))
    (root,) = search.wanted()
    search.grow(root, mixed("")[:1])
    assert root.children[0].end is end


def test_more_rollouts_until_a_right_solution() -> None:
    policy = letters(1, "abc", lambda path: 1.0 if path == "c" else -1.0, lambda path: None)
    few = MCTS(settings(rollouts=1))
    drive(few, policy)
    assert not few.tree.solved
    more = MCTS(settings(rollouts=1, more_rollouts=9))
    drive(more, policy)
    assert more.tree.solved and more.rollouts == 3


def test_a_node_is_grown_once() -> None:
    search = MCTS(settings())
    (root,) = search.wanted()
    assert search.wanted() == []  # its expansion is under way
    search.grow(root, [Step("a")])
    with pytest.raises(ValueError, match="node 0 was not to be expanded"):
        search.grow(root, [Step("a")])
