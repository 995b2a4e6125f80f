"""Runs searches of one set of problems on one start of engines and judge: the asked one, and those it is compared with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from rstar2_megatron.evaluation.services import SamplingSettings, Services, running_services
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.turn_loops import TurnLoops
from rstar2_megatron.search.expand import Expander
from rstar2_megatron.search.preference.reward_model import RewardModelScorer, identity_of, policy_rollout, running_scorers
from rstar2_megatron.search.solver import SearchProgress, Solver
from rstar2_megatron.search.traces import best_right, conversation
from rstar2_megatron.search.tree_file import TreeFile, tree_of
from rstar2_megatron.search.values import LikelihoodScorer, Scorer, Values
from rstar2_megatron.settings.sections.search import SearchSettings
from rstar2_megatron.trajectory import Problem

_SPARE = 1.5  # sampled attempts may be shorter than greedy ones, and problems differ
_MOST_ATTEMPTS = 256
_FILL = 2  # candidates under way, in multiples of what an engine runs at once


Plans = dict[str, SearchSettings]
"""The searches of a session, by the names of their files, in order."""


def plans(search: SearchSettings, *, compare: bool) -> Plans:
    """The asked search; with `compare` also a greedy attempt before it and the other search after it.

    Independent attempts of equal price follow when the price is known (`equal_attempts`).
    """
    if not compare:
        return {search.mode: search}
    greedy = search.model_copy(update={"mode": "sampling", "rollouts": 1, "temperature": 0.0, "top_p": 1.0})
    other = {"mode": "beam" if search.mode == "mcts" else "mcts"}
    if search.guide == "answers":  # which cannot rank the prefixes of a beam
        other["guide"] = "scores"
    return {"greedy": greedy, search.mode: search, other["mode"]: search.model_copy(update=other)}


def equal_attempts(search: SearchSettings, tokens: int, tokens_of_one: int) -> SearchSettings:
    """Enough attempts for the tokens of the search, judged by greedy ones; the table counts those that fit (`read_set`)."""
    attempts = min(_MOST_ATTEMPTS, max(2, round(_SPARE * tokens / max(1, tokens_of_one))))
    return search.model_copy(update={"mode": "sampling", "rollouts": attempts})


def identity(sampling: SamplingSettings, search: SearchSettings) -> dict[str, Any]:
    """Settings that all trees of a file share."""
    own = search.model_dump(mode="json", exclude={"trees", "num_problems", "reward_model", "reward_memory"})
    shared = sampling.identity | {"search": own}
    return shared if search.reward_model is None else shared | identity_of(search.reward_model)


def search_problems(
    problems: Sequence[Problem], sampling: SamplingSettings, search: SearchSettings, out: Path, *, compare: bool
) -> tuple[Plans, dict[str, str]]:
    """Search every problem that has no finished tree in `out`/NAME.jsonl yet. Returns the plans and spoiled problems.

    Raises SamplesError for files of other settings or a broken row, ValueError for problems that do not fit the context,
    EngineLost, JudgeServiceError, GraderLost. SIGINT ends it with KeyboardInterrupt, SIGTERM with asyncio.CancelledError, both
    after everything is stopped.
    """
    return _Session(problems, sampling, out).all(plans(search, compare=compare), search, compare)


def write_conversations(problems: Sequence[Problem], sampling: SamplingSettings, trees: Path, out: Path) -> int:
    """Write the best right solutions of a file of trees as rows of SFT data; returns how many.

    Raises UserCodeError when an environment cannot begin.
    """
    return write_jsonl(out, asyncio.run(_conversations(problems, sampling, trees)))


async def _conversations(problems: Sequence[Problem], sampling: SamplingSettings, trees: Path) -> list[dict[str, Any]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(sampling.rollout.model.model_path)
    template, loops = ChatTemplate(tokenizer, sampling.agentloop), TurnLoops(sampling.agentloop)
    by_id = {problem.query_id: problem for problem in problems}
    rows = []
    for _, row in TreeFile(trees, {}).rows():
        if (problem := by_id.get(row["query_id"])) is not None:
            async with loops.begin(problem, math.inf) as begun:
                for leaf in best_right(tree_of(row)):
                    segments = conversation(template, begun.problem, leaf.steps)
                    rows.append({"segments": [[text, int(trained)] for text, trained in segments]})
    return rows


def loop_sampling(sampling: SamplingSettings, search: SearchSettings) -> SamplingSettings:
    """The agent loop's sampling in a search."""
    turns = search.depth + (search.rules == "released")
    params = sampling.spec.sampling.model_copy(update={"temperature": search.temperature, "top_p": search.top_p})
    spec = replace(sampling.spec, sampling=params, max_assistant_turns=turns)
    agentloop = sampling.agentloop.model_copy(update={"max_assistant_turns": turns})
    return replace(sampling, spec=spec, agentloop=agentloop)


class _Session:
    def __init__(self, problems: Sequence[Problem], sampling: SamplingSettings, out: Path) -> None:
        self.problems, self.sampling, self.out = problems, sampling, out
        self.spoiled: dict[str, str] = {}

    def all(self, planned: Plans, search: SearchSettings, compare: bool) -> tuple[Plans, dict[str, str]]:
        unfinished = [name for name, settings in planned.items() if self._missing(name, settings)]
        if compare and not unfinished:
            planned["sampling"] = self._equal(search)
            unfinished = ["sampling"] if self._missing("sampling", planned["sampling"]) else []
            compare = False
        if unfinished:
            asyncio.run(self._run(planned, search, compare))
        return planned, self.spoiled

    def _file(self, name: str, settings: SearchSettings) -> TreeFile:
        sampling = loop_sampling(self.sampling, settings)
        return TreeFile(self.out / f"{name}.jsonl", identity(sampling, settings))

    def _missing(self, name: str, settings: SearchSettings) -> list[Problem]:
        finished, _ = self._file(name, settings).open(self.problems)
        return [problem for problem in self.problems if problem.query_id not in finished]

    def _equal(self, search: SearchSettings) -> SearchSettings:
        asked, greedy = (self._tokens(name) for name in (search.mode, "greedy"))
        return equal_attempts(search, asked, greedy)

    def _tokens(self, name: str) -> int:
        wanted = {problem.query_id for problem in self.problems}
        rows = TreeFile(self.out / f"{name}.jsonl", {}).rows()
        return sum(row["generated_tokens"] for _, row in rows if row["query_id"] in wanted)

    async def _run(self, planned: Plans, search: SearchSettings, compare: bool) -> None:
        whole = self.sampling.rollout.model_copy(update={"request_seeds": True})  # engines sample by the seeds of candidates
        reward, share = search.reward_model, search.reward_memory
        beside = whole if reward is None else policy_rollout(whole, share, on_gpu=torch.cuda.is_available())
        logs = self.out.resolve() / "logs"
        async with (
            running_services(replace(self.sampling, rollout=beside), self.problems, logs) as services,
            running_scorers(replace(self.sampling, rollout=whole), reward, share, logs) as scorers,
        ):
            for name, settings in planned.items():
                await self._search(name, settings, services, scorers)
            if compare and not self.spoiled:
                planned["sampling"] = self._equal(search)
                await self._search("sampling", planned["sampling"], services, scorers)

    async def _search(
        self, name: str, settings: SearchSettings, services: Services, reward_models: Sequence[RewardModelScorer]
    ) -> None:
        file = self._file(name, settings)
        finished, recorded = file.open(self.problems)
        sampling = loop_sampling(self.sampling, settings)
        scorers: Sequence[Scorer] = reward_models or [LikelihoodScorer() for _ in services.engines]
        expanders = [
            Expander(services.agent_loop(engine, sampling), Values(settings, services.rewards, scorer), settings)
            for engine, scorer in zip(services.engines, scorers, strict=True)
        ]
        width = settings.candidates if settings.mode == "mcts" else settings.candidates * settings.beam_width
        width = settings.rollouts if settings.mode == "sampling" else width
        trees = settings.trees or max(2, -(-_FILL * sampling.rollout.max_running_requests // width))
        left = [problem for problem in self.problems if problem.query_id not in finished]
        with tqdm(total=len(self.problems), initial=len(finished), desc=name, unit="problem", disable=None) as bar:

            def show(progress: SearchProgress, ended: bool) -> None:
                bar.update(int(ended))
                bar.set_postfix_str(
                    f"{progress.solved} solved, {progress.nodes} nodes, {progress.tokens_per_s:.0f} tokens/s", refresh=ended
                )

            progress = await Solver(left, settings, file, recorded, show).run(expanders, trees)
        file.close(complete=not progress.spoiled)
        self.spoiled |= progress.spoiled
        print(
            f"{name}: {progress.problems} problems, {progress.nodes} nodes, {progress.generated_tokens} generated "
            f"tokens, {progress.tokens_per_s:.0f} tokens/s, {progress.solved} with a right solution",
            flush=True,
        )
