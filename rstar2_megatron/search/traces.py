"""Right solutions of a tree as SFT conversations: rStar-Math's next round trains its policy on them. Pure.

Of each problem the two right solutions of the highest mean Q of their steps are taken (ties: the higher smallest Q). Of these,
the ones with a failed tool call are then dropped, as the released scripts do.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree import Node, Tree
from rstar2_megatron.trajectory import Problem

BEST = 2
Segments = list[tuple[str, bool]]


def best_right(tree: Tree) -> list[Node]:
    """Leaves of the `BEST` best right solutions without a failed tool call."""
    right = [leaf for leaf in tree.leaves() if leaf.step is not None and leaf.step.reward]

    def quality(leaf: Node) -> tuple[float, float]:
        values = [node.q for node in leaf.path]
        return statistics.fmean(values), min(values)

    best = sorted(right, key=quality, reverse=True)[:BEST]
    return [leaf for leaf in best if not any(step.failed(released=False) for step in leaf.steps)]


def conversation(template: ChatTemplate, problem: Problem, steps: Sequence[Step]) -> Segments:
    """(text, trained) segments of a finished solution, in the wording that produced it.

    problem: with what an environment added to its prompt.
    """
    answers = [
        [call.response_text for call in step.tool_calls] if step.observation is None else step.observation
        for step in steps[:-1]
    ]
    return template.conversation(problem, [step.text for step in steps], answers)
