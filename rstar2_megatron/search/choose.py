"""Chooses the answer of a tree: the solution of the best value, or a vote. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rstar2_megatron.evaluation.scores import Equal, answer_classes
from rstar2_megatron.search.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Solution:
    """A finished solution of a tree. `value` is the Q of its leaf, `reward` 1.0 when it is right by the known answer."""

    tag: str
    answer: str | None
    value: float
    reward: float
    copies: int = 1

    @property
    def positive(self) -> bool:
        return self.reward > 0


def solution(leaf: Node) -> Solution:
    assert leaf.step is not None
    return Solution(leaf.tag, leaf.step.answer, leaf.q, leaf.step.reward or 0.0, leaf.copies)


def solutions(tree: Tree, mode: str) -> list[Solution]:
    """The solutions to choose from: of beam search (`mode` beam) the finished beams, else every leaf."""
    return [solution(leaf) for leaf in tree.leaves() if leaf.kept or mode != "beam"]


def best_value(found: Sequence[Solution]) -> Solution | None:
    """The solution of the highest value, the first of equal ones; None when there is none."""
    return max(found, key=lambda s: s.value, default=None)


def most_frequent(found: Sequence[Solution], equal: Equal) -> Solution | None:
    """The first solution of the answer that most solutions share; None when no solution has an answer."""
    return _heaviest(found, lambda s: s.copies, equal)


def most_valued(found: Sequence[Solution], equal: Equal) -> Solution | None:
    """As `most_frequent`, with votes weighted by value: from 0 for -1 to 1 for +1."""
    return _heaviest(found, lambda s: s.copies * (s.value + 1) / 2, equal)


def _heaviest(found: Sequence[Solution], weight: Callable[[Solution], float], equal: Equal) -> Solution | None:
    best = max(answer_classes(found, equal), key=lambda members: sum(map(weight, members)), default=None)
    return best[0] if best else None
