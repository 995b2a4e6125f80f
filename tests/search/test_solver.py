"""The solver with scripted expansions: trees advance alone, lost engines, spoiled problems."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.rollout.engine.protocol import EngineLost
from rstar2_megatron.search.expand import ExpansionSpoiled
from rstar2_megatron.search.solver import Solver
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree import Node
from rstar2_megatron.search.tree_file import TreeFile
from rstar2_megatron.trajectory import Problem
from tests.search.scripted import finished, settings

PROBLEMS = [Problem(f"q{i}", [{"role": "user", "content": "?"}], ["1"]) for i in range(6)]
EXPANSIONS = 7  # of a tree


@dataclass
class Scripted:
    """Two steps, then a right answer. `slow` names a problem whose expansions end when those of all others have ended."""

    slow: str = ""
    lost_after: int | None = None
    spoils: str = ""
    log: list[tuple[str, str]] = field(default_factory=list)
    others_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def prompt_ids(self, problem: Problem) -> list[int]:
        return [7, 8]

    async def expand(self, problem: Problem, node: Node, count: int) -> list[Step]:
        await (self.others_ended.wait() if problem.query_id == self.slow else asyncio.sleep(0.005))
        if self.lost_after is not None and len(self.log) >= self.lost_after:
            raise EngineLost("gone")
        if problem.query_id == self.spoils:
            raise ExpansionSpoiled("the judge is away")
        self.log.append((problem.query_id, node.tag))
        if len(self.log) == EXPANSIONS * (len(PROBLEMS) - 1):
            self.others_ended.set()
        if node.depth == 2:
            return [finished("!", 1.0, 1.0)]
        return [Step(letter, [1, 2], [1, 1], [-1.0, -1.0]) for letter in "ab"]


def solver(tmp_path: Path, **values: Any) -> tuple[Solver, TreeFile]:
    file = TreeFile(tmp_path / "mcts.jsonl", {})
    finished_before, recorded = file.open(PROBLEMS)
    left = [p for p in PROBLEMS if p.query_id not in finished_before]
    return Solver(left, settings(rollouts=9, **values), file, recorded), file


def done(file: TreeFile) -> list[str]:
    return [row["query_id"] for _, row in file.rows()]


async def test_a_slow_tree_delays_no_other(tmp_path: Path) -> None:
    run, file = solver(tmp_path)
    async with asyncio.timeout(60):
        progress = await run.run([Scripted(slow="q0")], trees=2)  # type: ignore[list-item]
    assert done(file)[-1] == "q0" and set(done(file)) == {p.query_id for p in PROBLEMS}
    assert (progress.problems, progress.solved) == (6, 6) and progress.generated_tokens == 6 * 3 * 4


async def test_trees_of_a_lost_engine_move_and_repeat_nothing(tmp_path: Path) -> None:
    run, _ = solver(tmp_path)
    dying, other = Scripted(lost_after=5), Scripted()
    progress = await run.run([dying, other], trees=2)  # type: ignore[list-item]
    assert progress.problems == 6 and not progress.spoiled
    both = dying.log + other.log
    assert len(dying.log) == 5 and len(both) == len(set(both)) == 6 * EXPANSIONS


async def test_without_an_engine_it_ends_and_goes_on_later(tmp_path: Path) -> None:
    run, _ = solver(tmp_path)
    first = Scripted(lost_after=5)
    with pytest.raises(EngineLost, match="gone"):
        await run.run([first], trees=2)  # type: ignore[list-item]
    run, _ = solver(tmp_path)
    second = Scripted()
    progress = await run.run([second], trees=2)  # type: ignore[list-item]
    assert progress.problems == 6 and len(first.log + second.log) == 6 * EXPANSIONS


async def test_a_spoiled_problem_is_named_and_left_for_later(tmp_path: Path) -> None:
    run, file = solver(tmp_path)
    progress = await run.run([Scripted(spoils="q3")], trees=3)  # type: ignore[list-item]
    assert progress.spoiled == {"q3": "the judge is away"} and "q3" not in done(file)
    run, file = solver(tmp_path)
    again = await run.run([Scripted()], trees=3)  # type: ignore[list-item]
    assert again.problems == 1 and len(done(file)) == 6
