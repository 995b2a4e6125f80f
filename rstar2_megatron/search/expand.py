"""Expands a node: candidates for its next step, sent to the engine together, their code run on the judge.

A candidate is one turn of the agent loop that starts from the node's tokens. The engine computes the shared prefix once and
finds it in its cache for every later child.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time

import numpy as np

from rstar2_megatron.extension.user_code import UserCodeError
from rstar2_megatron.rollout.agent_loop import AgentLoop, OneTurn
from rstar2_megatron.rollout.engine.protocol import EngineLost
from rstar2_megatron.search.step import Step, path_trajectory, step_of
from rstar2_megatron.search.tree import Node
from rstar2_megatron.search.values import Values
from rstar2_megatron.settings.sections.search import SearchSettings
from rstar2_megatron.trajectory import Problem

log = logging.getLogger(__name__)

MAX_TRIES = 3  # of one candidate that infrastructure spoils


class ExpansionSpoiled(RuntimeError):
    """The infrastructure failed again and again; the expansion has no result, and no value."""


def candidate_seed(seed: int, query_id: str, tag: str, candidate: int) -> int:
    """31 bits that depend on nothing but the search's seed and the candidate's place, so that a resumed tree is the same."""
    text = f"{seed}\0{query_id}\0{tag}\0{candidate}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


class Expander:
    """Expansions on one engine. Any number may run concurrently."""

    def __init__(self, loop: AgentLoop, values: Values, settings: SearchSettings, *, retry_s: float = 1.0) -> None:
        """retry_s: pause before a candidate that infrastructure spoiled is tried again."""
        self.loop = loop
        self.loop.tools.shown_seconds = 0.0  # measured times would make every resumed tree another one
        self.values = values
        self.settings = settings
        self.retry_s = retry_s

    async def prompt_ids(self, problem: Problem) -> list[int]:
        """The token ids that every path of the problem begins with, with what an environment adds to the prompt.

        Raises ExpansionSpoiled when the environment cannot begin.
        """
        try:
            async with self.loop.turn_loops.begin(problem, time.monotonic() + self.loop.timeout_s) as turn_loop:
                return self.loop.template.prompt_ids(turn_loop.problem)
        except UserCodeError as error:
            raise ExpansionSpoiled(f"{problem.query_id}: {error}") from error

    async def expand(self, problem: Problem, node: Node, count: int) -> list[Step]:
        """`count` candidates for the step after `node`, with values.

        Raises EngineLost when the engine is gone for good, ExpansionSpoiled after MAX_TRIES failures of a candidate or when
        an environment cannot begin.
        """
        before = node.steps
        prompt_ids = np.array(await self.prompt_ids(problem), np.int32)
        candidates = [self._candidate(problem, node.tag, before, prompt_ids, i) for i in range(count)]
        steps = list(await asyncio.gather(*candidates))
        await self.values.assign(prompt_ids, before, steps)
        return steps

    async def _candidate(self, problem: Problem, tag: str, before: list[Step], prompt_ids: np.ndarray, index: int) -> Step:
        seed = candidate_seed(self.settings.seed, problem.query_id, tag, index)
        turn = OneTurn(max_tokens=self.settings.max_step_tokens, seed=seed)
        for number in range(MAX_TRIES):
            path = path_trajectory(problem, before, prompt_ids)
            tokens, calls = len(path.response_ids), len(path.tool_calls)
            done = await self.loop.run(problem, index, resume=path, one_turn=turn)
            if self.loop.engine_gone:
                raise EngineLost(self.loop.engine_gone)
            if done.num_turns == len(before) + 1:
                if done.usable:
                    await self.values.rewards.grade([(problem, done)])  # sets reward and answer, or that an own reward failed
                if done.finish_reason is None or done.usable:
                    return step_of(done, tokens, calls)
            log.warning("candidate %s.%d of %s: %s", tag, index, problem.query_id, done.error)
            if number + 1 < MAX_TRIES:
                await asyncio.sleep(self.retry_s)
        raise ExpansionSpoiled(f"{problem.query_id}, node {tag}: {done.error or 'cut off'}")
