"""Searches many problems: each tree advances as soon as its own expansion ends, and the engines batch what is under way.

Engines pull problems from one queue. A tree stays on its engine, whose cache holds its prefixes, unless the engine is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rstar2_megatron.evaluation.attempt_queue import run_together
from rstar2_megatron.rollout.engine.protocol import EngineLost
from rstar2_megatron.search.beam import Attempts, Beam
from rstar2_megatron.search.expand import Expander, ExpansionSpoiled
from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.strategy import Search
from rstar2_megatron.search.tree import Node
from rstar2_megatron.search.tree_file import Recorded, TreeFile, tree_row
from rstar2_megatron.settings.sections.search import SearchSettings
from rstar2_megatron.trajectory import Problem

_IDLE_S = 0.2

SEARCHES: dict[str, type[Search]] = {"mcts": MCTS, "beam": Beam, "sampling": Attempts}


@dataclass(slots=True)
class SearchProgress:
    """Counters of a running search; tokens of resumed expansions are not counted again."""

    problems: int = 0
    solved: int = 0
    nodes: int = 0
    generated_tokens: int = 0
    spoiled: dict[str, str] = field(default_factory=dict)
    """Problems whose search infrastructure ended, and why."""
    started: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / max(1e-9, time.monotonic() - self.started)


class Solver:
    """One call of `run` searches all problems. `on_change` is called after every expansion and every finished tree."""

    def __init__(
        self,
        problems: Iterable[Problem],
        settings: SearchSettings,
        file: TreeFile,
        recorded: dict[str, Recorded],
        on_change: Callable[[SearchProgress, bool], None] = lambda progress, finished: None,
    ) -> None:
        self._waiting = deque(problems)
        self._settings = settings
        self._file = file
        self._recorded = recorded
        self._on_change = on_change
        self._under_way = 0
        self.progress = SearchProgress()

    async def run(self, expanders: Sequence[Expander], trees: int) -> SearchProgress:
        """Search with `trees` problems under way on each engine.

        A problem that infrastructure spoils is left unfinished in the file, and the others go on. Raises EngineLost when
        no engine is left.
        """
        losses: list[list[EngineLost]] = [[] for _ in expanders]
        served = zip(expanders, losses, strict=True)
        await run_together(self._serve(expander, lost) for expander, lost in served for _ in range(trees))
        if self._waiting:
            raise losses[0][0]
        return self.progress

    async def _serve(self, expander: Expander, lost: list[EngineLost]) -> None:
        """Search one problem after another, until none is left or the engine is `lost` for good, here or beside."""
        while not lost and (self._waiting or self._under_way):
            if not self._waiting:  # a tree of another engine may still come back
                await asyncio.sleep(_IDLE_S)
                continue
            try:
                await self._one(self._waiting.popleft(), expander)
            except EngineLost as error:
                lost.append(error)

    async def _one(self, problem: Problem, expander: Expander) -> None:
        started = time.monotonic()
        self._under_way += 1
        try:
            search = await self._solve(problem, expander)
            prompt_ids = await expander.prompt_ids(problem)
        except ExpansionSpoiled as error:
            self.progress.spoiled[problem.query_id] = str(error)
            return
        except EngineLost:
            self._waiting.append(problem)  # its expansions so far are recorded
            raise
        finally:
            self._under_way -= 1
        self._file.finish(tree_row(problem, search, self._settings.mode, time.monotonic() - started, prompt_ids))
        self._recorded.pop(problem.query_id, None)
        self.progress.problems += 1
        self.progress.solved += search.tree.solved
        self._on_change(self.progress, True)

    async def _solve(self, problem: Problem, expander: Expander) -> Search:
        search = SEARCHES[self._settings.mode](self._settings)
        known = self._recorded.setdefault(problem.query_id, {})
        running: dict[asyncio.Task[list[Step]], Node] = {}
        try:
            while True:
                for node in search.wanted():
                    work = self._expand(problem, node, search.candidates(node), known, expander)
                    running[asyncio.create_task(work)] = node
                if not running:
                    return search
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    node = running.pop(task)
                    search.grow(node, task.result())
                    self.progress.nodes += len(node.children or [])
                self._on_change(self.progress, False)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _expand(self, problem: Problem, node: Node, count: int, known: Recorded, expander: Expander) -> list[Step]:
        steps = known.get(node.tag)
        if steps is None:
            steps = await expander.expand(problem, node, count)
            self._file.record(problem.query_id, node.tag, steps)
            known[node.tag] = steps
            self.progress.generated_tokens += sum(step.generated_tokens for step in steps)
        return steps
