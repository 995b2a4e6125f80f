"""A policy given as a table, and a driver that grows a search by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rstar2_megatron.search.step import Step
from rstar2_megatron.search.strategy import Search
from rstar2_megatron.search.tree import Node
from rstar2_megatron.settings.schema import SearchSettings
from rstar2_megatron.trajectory import FinishReason

Policy = Callable[[str], Sequence[Step]]
ANSWERED = FinishReason.ANSWERED


def name(node: Node) -> str:
    """The texts of the path."""
    return "".join(step.text for step in node.steps)


def finished(text: str, value: float | None, reward: float | None = None) -> Step:
    return Step(text, ending=ANSWERED, answer=text, reward=reward, value=value)


def drive(search: Search, policy: Policy) -> list[str]:
    """Grow the search to its end; returns the expanded prefixes in order."""
    order = []
    while wanted := search.wanted():
        for node in wanted:
            order.append(name(node))
            search.grow(node, policy(name(node)))
    return order


def settings(**values: object) -> SearchSettings:
    return SearchSettings.model_validate({"depth": 3, "rollouts": 6, **values})


def letters(depth: int, alphabet: str, judge: Callable[[str], float], score: Callable[[str], float | None]) -> Policy:
    """Every letter is a step; after `depth` of them comes one answer, worth judge(path)."""

    def propose(path: str) -> list[Step]:
        if len(path) == depth:
            value = judge(path)
            return [finished("!", value, float(value > 0))]
        return [Step(letter, value=score(path + letter)) for letter in alphabet]

    return propose
