"""The tree of one problem: nodes are prefixes of solutions, with rStar-Math's N and q. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rstar2_megatron.search.step import Step


class End(StrEnum):
    """Why a node is never expanded again."""

    ANSWER = "answer"  # a finished solution
    ERRORS = "errors"  # too many consecutive steps with a tool error
    DEPTH = "depth"  # the depth limit, without an answer
    LIMIT = "limit"  # the length limit of a turn or of the whole solution, or the model repeats itself
    EXHAUSTED = "exhausted"  # every child has ended


@dataclass(slots=True, eq=False)
class Node:
    """A prefix of a solution. `tag` is the released code's: the root is 0, its children 0.1, 0.2, ..."""

    tag: str
    depth: int = 0
    parent: Node | None = None
    step: Step | None = None  # None at the root
    children: list[Node] | None = None  # None: not expanded
    visits: int = 0  # N
    total: float = 0.0  # q
    value: float | None = None  # the first value that it got
    errors: int = 0  # consecutive steps with a tool error, this one included
    end: End | None = None
    asked: bool = False  # its expansion is under way
    copies: int = 1  # candidates of this text
    kept: bool = False  # a finished solution that beam search kept

    @property
    def q(self) -> float:
        """Q = q / N; 0 for a node without a visit."""
        return self.total / self.visits if self.visits else 0.0

    @property
    def path(self) -> list[Node]:
        """From the root's child to this node."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def steps(self) -> list[Step]:
        return [node.step for node in self.path if node.step is not None]

    def visit(self, value: float) -> None:
        """N + 1, q + value, on this node only."""
        self.visits += 1
        self.total += value
        if self.value is None:
            self.value = value

    def visit_path(self, value: float) -> None:
        """The same from this node to the root (back-propagation)."""
        node: Node | None = self
        while node is not None:
            node.visit(value)
            node = node.parent

    def walk(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children or [])


@dataclass(slots=True)
class Tree:
    """One problem's tree; `generated_tokens` counts every candidate, also those that were merged or dropped."""

    root: Node = field(default_factory=lambda: Node("0"))
    generated_tokens: int = 0
    expansions: int = 0

    def leaves(self) -> list[Node]:
        """The finished solutions, in the order of their tags."""
        return [node for node in self.root.walk() if node.end is End.ANSWER]

    @property
    def solved(self) -> bool:
        """Whether some finished solution is right by the known answer."""
        return any(leaf.step is not None and leaf.step.reward for leaf in self.leaves())
