"""What every search does: which nodes to expand next, and what their new children mean. Pure.

A search never waits and never calls anything: the solver asks for `wanted()`, expands these nodes, and passes the
candidates to `grow()`. So the same candidates always give the same tree, and a tree is resumed by growing it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree import End, Node, Tree
from rstar2_megatron.settings.schema import SearchSettings

DEAD_VALUE = -1.0
"""Value of a node that ended without an answer; it reaches that node only."""


class Search(ABC):
    """The search of one problem."""

    merges = True
    """Candidates of equal text are one child."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.released = settings.rules == "released"
        self.tree = Tree()

    @abstractmethod
    def wanted(self) -> list[Node]:
        """Nodes to expand now, each exactly once. Empty while other expansions are under way, or at the end."""

    @abstractmethod
    def grown(self, node: Node) -> None:
        """Values and selection after `node` got its children."""

    def candidates(self, node: Node) -> int:
        return self.settings.candidates

    def grow(self, node: Node, steps: Sequence[Step]) -> None:
        """Give a wanted node its children. Raises ValueError when it was not asked for, or has children."""
        if node.children is not None or not node.asked:
            raise ValueError(f"node {node.tag} was not to be expanded")
        self.tree.expansions += 1
        self.tree.generated_tokens += sum(step.generated_tokens for step in steps)
        node.children = []
        by_text: dict[str, Node] = {}
        for step in self._kept(steps):
            if self.merges and step.text in by_text:
                by_text[step.text].copies += 1
                continue
            child = Node(f"{node.tag}.{len(node.children) + 1}", node.depth + 1, node, step)
            child.errors = node.errors + 1 if step.failed(released=self.released) else 0
            child.end = self._end(child, step)
            by_text[step.text] = child
            node.children.append(child)
        self.grown(node)

    def _kept(self, steps: Sequence[Step]) -> Sequence[Step]:
        """released: when a candidate is a finished solution, the first of them is the only child."""
        first = next((step for step in steps if step.answered), None)
        return [first] if self.released and first is not None else steps

    def _end(self, child: Node, step: Step) -> End | None:
        threshold, depth = self.settings.errors_threshold, self.settings.depth
        if step.answered:
            return End.ANSWER
        if threshold is not None and child.errors >= threshold:
            return End.ERRORS
        # released: the limit is noticed one level later, and its rollouts have at most `depth` levels
        if child.depth >= depth + self.released:
            return End.DEPTH
        return End.LIMIT if step.ending is not None else None

    def _ask(self, nodes: Sequence[Node]) -> list[Node]:
        for node in nodes:
            node.asked = True
        return list(nodes)
