"""Monte Carlo tree search over steps (arXiv 2501.04519, section 3.2). Pure.

A rollout is one descent from the root: a node without children is expanded, then its best child is taken, until every child
has ended or the depth is reached. There is no separate simulation. A finished solution's value reaches its whole path. A
scored prefix counts its score once, on itself, so that q starts from the score (PPM-augmented) or from 0 (terminal-guided).
The best child is that of UCT: Q + c sqrt(ln N_parent / N), without a bonus for unvisited nodes.
"""

from __future__ import annotations

import math

from rstar2_megatron.search.strategy import DEAD_VALUE, Search
from rstar2_megatron.search.tree import End, Node
from rstar2_megatron.settings.schema import SearchSettings


def uct(node: Node, parent_visits: int, exploration: float) -> float:
    """Score of a child. The bonus is 0 when either count is 0, so an unvisited node scores 0, not infinity."""
    if not node.visits or not parent_visits:
        return node.q
    return node.q + exploration * math.sqrt(math.log(parent_visits) / node.visits)


def select(parent: Node, exploration: float) -> Node | None:
    """The child of highest score that has not ended, the first of equal ones; None when all have ended."""
    waiting = [child for child in parent.children or [] if child.end is None]
    return max(waiting, key=lambda child: uct(child, parent.visits, exploration), default=None)


class MCTS(Search):
    """One expansion is under way at a time, so values decide every descent."""

    def __init__(self, settings: SearchSettings) -> None:
        super().__init__(settings)
        self.rollouts = 0
        """Rollouts that have ended."""
        self.found: list[list[str]] = [[]]
        """Tags of the solutions that each rollout found; the last entry is the next rollout's."""
        self._at = self.tree.root
        self._level = 0

    def wanted(self) -> list[Node]:
        if self._at.asked and self._at.children is None:
            return []
        while self.tree.root.end is None and self.rollouts < self._limit():
            node = self._descend()
            if node is not None:
                return self._ask([node])
            self._end_rollout()
        return []

    def _end_rollout(self) -> None:
        self._at, self._level = self.tree.root, 0
        self.rollouts += 1
        self.found.append([])

    def _limit(self) -> int:
        """`more_rollouts` are added while no solution is right."""
        more = 0 if self.tree.solved else self.settings.more_rollouts
        return self.settings.rollouts + more

    def _descend(self) -> Node | None:
        """The next node to expand on the way down; None when the rollout has ended."""
        while self._level < self.settings.depth:
            if self._at.children is None:
                return self._at
            best = select(self._at, self.settings.exploration)
            if best is None:
                self._at.end = End.EXHAUSTED
                return None
            self._at, self._level = best, self._level + 1
        return None

    def grown(self, node: Node) -> None:
        for child in node.children or []:
            assert child.step is not None
            if child.end is End.ANSWER:
                child.visit_path(child.step.value or 0.0)
                self.found[-1].append(child.tag)
            elif child.end is not None:
                child.visit(DEAD_VALUE)
            elif child.step.value is not None:
                child.visit(child.step.value)
        if not self.released:
            self._pass_exhaustion_up(node)

    def _pass_exhaustion_up(self, node: Node | None) -> None:
        """released: an ancestor notices only when a later rollout comes by, and that rollout finds nothing."""
        while node is not None and all(child.end is not None for child in node.children or []):
            node.end = End.EXHAUSTED
            node = node.parent
        if node is None:
            self._end_rollout()  # the last one
