"""Beam search over steps, and independent attempts in the same form. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rstar2_megatron.search.step import Step
from rstar2_megatron.search.strategy import DEAD_VALUE, Search
from rstar2_megatron.search.tree import End, Node
from rstar2_megatron.settings.schema import SearchSettings


class Beam(Search):
    """Each depth: `candidates` children of every kept prefix, of which the best `beam_width` stay.

    Finished solutions compete with the prefixes of their depth; one that stays lowers the width by one. Values are the
    scorer's, on the whole prefix. There is no back-propagation.
    """

    def __init__(self, settings: SearchSettings) -> None:
        super().__init__(settings)
        self._width = settings.beam_width
        self._level: list[Node] = [self.tree.root]
        self._open = 1  # nodes of the level without children

    def wanted(self) -> list[Node]:
        return self._ask([node for node in self._level if not node.asked])

    def grown(self, node: Node) -> None:
        for child in node.children or []:
            assert child.step is not None
            value = child.step.value or 0.0
            child.visit(value if child.end in (None, End.ANSWER) else DEAD_VALUE)
        self._open -= 1
        if not self._open:
            self._next_level()

    def _next_level(self) -> None:
        children = [child for node in self._level for child in node.children or []]
        ranked = sorted((c for c in children if c.end in (None, End.ANSWER)), key=lambda c: -c.q)
        kept = ranked[: self._width]
        for child in kept:
            child.kept = child.end is End.ANSWER
        self._level = [child for child in kept if child.end is None]
        self._width -= len(kept) - len(self._level)
        if not self._width:
            self._level = []
        self._open = len(self._level)


class Attempts(Search):
    """`rollouts` independent attempts: what a search is compared with. Equal attempts stay apart."""

    merges = False

    def __init__(self, settings: SearchSettings) -> None:
        super().__init__(settings)
        self._waiting: list[Node] = [self.tree.root]

    def candidates(self, node: Node) -> int:
        return 1 if node.parent is not None else self.settings.rollouts

    def _kept(self, steps: Sequence[Step]) -> Sequence[Step]:
        return steps

    def wanted(self) -> list[Node]:
        waiting, self._waiting = self._waiting, []
        return self._ask(waiting)

    def grown(self, node: Node) -> None:
        for child in node.children or []:
            assert child.step is not None
            if child.end is End.ANSWER:
                child.visit_path(child.step.value or 0.0)
            elif child.end is None:
                self._waiting.append(child)
