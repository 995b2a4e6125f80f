"""Searches with every part real: SGLang, the agent loop's turns, the Code Judge, the grader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.search.expand import Expander
from rstar2_megatron.search.solver import SearchProgress, Solver
from rstar2_megatron.search.step import path_trajectory
from rstar2_megatron.search.tree_file import TreeFile, tree_of
from rstar2_megatron.search.values import LikelihoodScorer, Values
from rstar2_megatron.settings.schema import RewardSettings, SamplingParams, SearchSettings
from tests.rollout.memorised import CONVERSATIONS, SETTINGS, problem
from tests.search.written_trees import trees

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600), pytest.mark.ci]
PROBLEMS = [problem(name) for name in CONVERSATIONS]


@pytest_asyncio.fixture(loop_scope="session")
async def judge(judge_service: JudgeService) -> AsyncIterator[JudgeClient]:
    async with JudgeClient(judge_service.url, time_limit_s=1.0, request_timeout_s=60) as client:
        yield client


def make_loop(engine: EngineClient, judge: JudgeClient, temperature: float, turns: int) -> AgentLoop:
    settings = SETTINGS.model_copy(update={"max_assistant_turns": turns})
    template = ChatTemplate(AutoTokenizer.from_pretrained(engine.settings.model.model_path), settings)
    sampling = SamplingParams(max_new_tokens=400, temperature=temperature)
    return AgentLoop(engine, judge, template, settings, sampling, max_context_tokens=1000, timeout_s=240)


def searching(**values: Any) -> SearchSettings:
    defaults = {"rollouts": 4, "candidates": 3, "depth": 2, "temperature": 0.6, "guide": "answers"}
    return SearchSettings.model_validate({**defaults, **values})


async def search(engine: EngineClient, judge: JudgeClient, path: Path, settings: SearchSettings) -> SearchProgress:
    """Search all problems into `path`."""
    file = TreeFile(path, settings.model_dump())
    _, recorded = file.open(PROBLEMS)
    loop = make_loop(engine, judge, settings.temperature, settings.depth)
    with Rewards(RewardSettings()) as pool:
        expander = Expander(loop, Values(settings, pool, LikelihoodScorer()), settings)
        solver = Solver(PROBLEMS, settings, file, recorded)
        async with asyncio.timeout(240):
            await solver.run([expander], trees=2)
    return solver.progress


async def test_one_greedy_candidate_is_the_agent_loop(engine: EngineClient, judge: JudgeClient, tmp_path: Path) -> None:
    settings = searching(candidates=1, rollouts=1, temperature=0.0, errors_threshold=None)
    await search(engine, judge, tmp_path / "mcts.jsonl", settings)
    loop = make_loop(engine, judge, 0.0, settings.depth)
    loop.tools.shown_seconds = 0.0
    rows = {json.loads(line)["query_id"]: json.loads(line) for line in (tmp_path / "mcts.jsonl").open()}
    for one in PROBLEMS:
        whole = await loop.run(one, 0)
        (leaf,) = tree_of(rows[one.query_id]).leaves()
        ours = path_trajectory(one, leaf.steps, whole.prompt_ids)
        for name in ("prompt_ids", "response_ids", "loss_mask"):
            assert getattr(ours, name).tolist() == getattr(whole, name).tolist(), name
        # batches of other sizes differ in the last bits
        np.testing.assert_allclose(ours.rollout_logprobs, whole.rollout_logprobs, atol=1e-4)
        assert ours.assistant_texts == whole.assistant_texts and ours.finish_reason is whole.finish_reason


async def test_an_engine_killed_in_a_search_changes_no_tree(engine: EngineClient, judge: JudgeClient, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "mcts.jsonl"
    progress = await search(engine, judge, whole, searching())
    assert progress.problems == 3 and not progress.spoiled
    expected = trees(whole)
    calls = [call["outcome"] for nodes in expected.values() for n in nodes if n["step"] for call in n["step"]["tool_calls"]]
    assert {"ok", "timeout", "malformed"} <= set(calls), "the judge must have something to do"

    restarts = engine.restarts
    running = asyncio.create_task(search(engine, judge, path, searching()))
    while not path.with_suffix(".expansions.jsonl").exists() and not running.done():
        await asyncio.sleep(0.01)
    psutil.Process(engine.pid).kill()
    progress = await running
    assert engine.restarts == restarts + 1 and not progress.spoiled
    assert trees(path) == expected
