"""UCT as in rStar-Math: Q + c sqrt(ln N_parent / N), without a bonus for unvisited nodes. Pure."""

from __future__ import annotations

import math

from rstar2_megatron.search.tree import Node


def uct(node: Node, parent_visits: int, exploration: float) -> float:
    """Score of a child. The bonus is 0 when either count is 0, so an unvisited node scores 0, not infinity."""
    if not node.visits or not parent_visits:
        return node.q
    return node.q + exploration * math.sqrt(math.log(parent_visits) / node.visits)


def select(parent: Node, exploration: float) -> Node | None:
    """The child of highest score that has not ended, the first of equal ones; None when all have ended."""
    waiting = [child for child in parent.children or [] if child.end is None]
    return max(waiting, key=lambda child: uct(child, parent.visits, exploration), default=None)
