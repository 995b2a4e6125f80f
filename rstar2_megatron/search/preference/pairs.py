"""Preference pairs of a tree: rStar-Math trains its process preference model on them (arXiv 2501.04519). Pure.

A comparison holds the better and the worse candidates of one step. At a node these are the children of the highest Q among
those that lead to a right answer, and the children of the lowest Q among those that lead to a wrong one. A child may lead to
both, so a pair counts only when its better side has the higher Q by `min_margin` and the better continuation. The final answer
is compared over whole solutions, which need not share a prefix.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rstar2_megatron.search.tree import End, Node, Tree
from rstar2_megatron.settings.schema import PreferenceSettings


@dataclass(frozen=True, slots=True)
class NodePairs:
    """One comparison: nodes whose prefixes are scored, and the pairs (index in `better`, index in `worse`) that count."""

    better: list[Node]
    worse: list[Node]
    pairs: list[tuple[int, int]]


def verdict(leaf: Node) -> bool | None:
    """Whether a path ended right. None for an unfinished path, and for one that tool errors ended: it has no answer."""
    if leaf.end is End.ANSWER:
        return bool(leaf.step is not None and leaf.step.reward)
    if leaf.end in (End.DEPTH, End.LIMIT) and leaf.step is not None:
        return None if leaf.step.failed(released=False) else False
    return None


def pairs_of(tree: Tree, settings: PreferenceSettings) -> list[NodePairs]:
    """The comparisons of a tree: of siblings, parents first, then of whole solutions."""
    right, wrong = _continuations(tree)
    found = [_of_children(node, right, wrong, settings) for node in tree.root.walk() if node.children]
    comparisons = [comparison for comparison in found if comparison.pairs]
    if settings.whole_solutions:
        known = {(comparison.better[i].tag, comparison.worse[j].tag) for comparison in comparisons for i, j in comparison.pairs}
        whole = _of_solutions(tree, known, settings)
        comparisons += [whole] if whole.pairs else []
    return comparisons


def _continuations(tree: Tree) -> tuple[dict[str, float], dict[str, float]]:
    """By tag, the mean Q of the best continuation to a right leaf, and of the worst to a wrong one.

    The means begin with the node itself. Nodes without such a leaf are left out.
    """
    best: dict[str, float] = {}
    worst: dict[str, float] = {}
    for leaf in tree.root.walk():
        right = verdict(leaf)
        if right is None:
            continue
        total = 0.0
        for count, node in enumerate(reversed(leaf.path), 1):
            total += node.q
            mean = total / count
            if right:
                best[node.tag] = max(mean, best.get(node.tag, mean))
            else:
                worst[node.tag] = min(mean, worst.get(node.tag, mean))
    return best, worst


def _of_children(parent: Node, right: dict[str, float], wrong: dict[str, float], settings: PreferenceSettings) -> NodePairs:
    children = parent.children or []
    leading_right = sorted((child for child in children if child.tag in right), key=lambda child: -child.q)
    leading_wrong = sorted((child for child in children if child.tag in wrong), key=lambda child: child.q)
    better = leading_right[: _count(len(leading_wrong), settings.best)]
    worse = leading_wrong[: _count(len(leading_right), settings.best)]

    def counts(winner: Node, loser: Node) -> bool:
        margin = winner.q - loser.q
        return (
            winner is not loser
            and margin > 0
            and margin >= settings.min_margin
            and right[winner.tag] > wrong[loser.tag]
            and differ(_text([winner]), _text([loser]), settings.min_distance)
        )

    return without_idle(better, worse, [(i, j) for i, g in enumerate(better) for j, b in enumerate(worse) if counts(g, b)])


def _count(of_other_side: int, best: int) -> int:
    """Candidates of a side: more where the other side has a single one."""
    return 2 * best if of_other_side == 1 else best


def _of_solutions(tree: Tree, known: set[tuple[str, str]], settings: PreferenceSettings) -> NodePairs:
    """The best right solutions against the worst wrong ones, by the mean Q of their steps; without pairs that are `known`."""
    leaves = sorted(tree.leaves(), key=lambda leaf: -statistics.fmean(node.q for node in leaf.path))
    better = [leaf for leaf in leaves if verdict(leaf)][: settings.best]
    worse = [leaf for leaf in reversed(leaves) if verdict(leaf) is False][: settings.best]
    pairs = [
        (i, j)
        for i, winner in enumerate(better)
        for j, loser in enumerate(worse)
        if (winner.tag, loser.tag) not in known and differ(_text(winner.path), _text(loser.path), settings.min_distance)
    ]
    return without_idle(better, worse, pairs)


def without_idle(better: list[Node], worse: list[Node], pairs: list[tuple[int, int]]) -> NodePairs:
    """Leave out nodes that no pair uses: nothing would be learned from their scores."""
    left, right = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
    return NodePairs([better[i] for i in left], [worse[j] for j in right], [(left.index(i), right.index(j)) for i, j in pairs])


def _text(nodes: Sequence[Node]) -> str:
    return "\n".join(node.step.text for node in nodes if node.step is not None)


def differ(first: str, second: str, least: int) -> bool:
    """Whether the Levenshtein distance of two texts is at least `least`; takes time in proportion to `least` x length."""
    if abs(len(first) - len(second)) >= least:
        return True
    here, there = Counter(first), Counter(second)
    if max((here - there).total(), (there - here).total()) >= least:
        return True  # every edit changes the counts of letters by at most one on each side
    # Only cells near the diagonal can be below `least`.
    row = {j: j for j in range(min(least, len(second) + 1))}
    for i, letter in enumerate(first, 1):
        above, row = row, {}
        for j in range(max(0, i - least + 1), min(len(second), i + least - 1) + 1):
            if j == 0:
                row[j] = i
                continue
            change = above.get(j - 1, least) + (letter != second[j - 1])
            row[j] = min(change, above.get(j, least) + 1, row.get(j - 1, least) + 1)
        if min(row.values(), default=least) >= least:
            return True
    return row.get(len(second), least) >= least
