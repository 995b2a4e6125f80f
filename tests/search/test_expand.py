"""Expansion with written turns: seeds, retries of infrastructure failures, interpreters that replay their path."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.judge.client.client import JudgeUnavailable
from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.rollout.engine.protocol import EngineLost
from rstar2_megatron.search.expand import Expander, ExpansionSpoiled, candidate_seed
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree import Node
from rstar2_megatron.search.values import LikelihoodScorer, Prefix, Values
from rstar2_megatron.settings.schema import RewardSettings, SearchSettings
from rstar2_megatron.tools import JUPYTER
from rstar2_megatron.trajectory import FinishReason, ToolOutcome
from tests.rollout.written import ANSWER, CELL, PROBLEM, WrittenJudge, call, make_loop, written


@pytest.fixture(scope="module")
def pool():
    with Rewards(RewardSettings()) as grader:
        yield grader


def make(tokenizer: Any, pool: Rewards, turns: list[Any], judge: Any = None, guide: str = "answers", **settings: Any):
    loop = make_loop(tokenizer, turns, judge, **settings)
    searching = SearchSettings(guide=guide)
    return Expander(loop, Values(searching, pool, LikelihoodScorer()), searching, retry_s=0.01), loop


async def test_a_step_is_a_turn_with_its_tool_response(tokenizer, pool: Rewards) -> None:
    expander, loop = make(tokenizer, pool, [call(), ANSWER])
    root = Node("0")
    (step,) = await expander.expand(PROBLEM, root, 1)
    assert step.text == call() and step.ending is None and step.value is None
    assert [c.outcome for c in step.tool_calls] == [ToolOutcome.OK]
    assert "execution time: 0.00s" in step.tool_calls[0].response_text  # measured: 0.01
    child = Node("0.1", 1, root, step)
    (last,) = await expander.expand(PROBLEM, child, 1)
    assert last.ending is FinishReason.ANSWERED and (last.answer, last.reward, last.value) == ("4", 1.0, 1.0)
    # the engine continued exactly the tokens of the path
    assert written(loop).seen[1] == [*loop.template.prompt_ids(PROBLEM), *step.ids]
    assert step.generated_tokens == int(step.mask.sum()) < len(step.ids)


async def test_a_wrong_answer_is_minus_one_and_a_dead_end_has_no_value(tokenizer, pool: Rewards) -> None:
    wrong = ANSWER.replace("4", "5")
    expander, _ = make(tokenizer, pool, [wrong])
    (step,) = await expander.expand(PROBLEM, Node("0"), 1)
    assert (step.reward, step.value) == (0.0, -1.0)
    expander, _ = make(tokenizer, pool, [wrong], max_new_tokens=5)
    (step,) = await expander.expand(PROBLEM, Node("0"), 1)
    assert step.ending is FinishReason.LENGTH_LIMIT and step.value is None


async def test_scores_guide_by_likelihood(tokenizer, pool: Rewards) -> None:
    expander, _ = make(tokenizer, pool, [call(), ANSWER], guide="scores")
    (step,) = await expander.expand(PROBLEM, Node("0"), 1)
    assert step.value == pytest.approx(2 * np.exp(-0.5) - 1)  # every written token has log-prob -0.5
    expander, _ = make(tokenizer, pool, [ANSWER], guide="answers+scores")
    (step,) = await expander.expand(PROBLEM, Node("0"), 1)
    assert step.value == 1.0


async def test_infrastructure_failures_are_retried_and_never_a_value(tokenizer, pool: Rewards) -> None:
    ok = JudgeResult(Outcome.OK, "4\n", "", 0, 0.01)
    judge = WrittenJudge(JudgeUnavailable("away"), ok)
    expander, _ = make(tokenizer, pool, [call()], judge)
    (step,) = await expander.expand(PROBLEM, Node("0"), 1)
    assert [c.outcome for c in step.tool_calls] == [ToolOutcome.OK]
    expander, _ = make(tokenizer, pool, [call()], WrittenJudge(JudgeUnavailable("away")))
    with pytest.raises(ExpansionSpoiled, match=r"q, node 0: .*away"):
        await expander.expand(PROBLEM, Node("0"), 1)


async def test_a_lost_engine_ends_the_expansion(tokenizer, pool: Rewards) -> None:
    expander, loop = make(tokenizer, pool, [EngineLost("gone")])
    written(loop).recover_error = EngineLost("gone for good")
    with pytest.raises(EngineLost, match="gone for good"):
        await expander.expand(PROBLEM, Node("0"), 2)


async def test_an_interpreter_replays_the_cells_of_its_path(tokenizer, pool: Rewards) -> None:
    judge = WrittenJudge()
    expander, _ = make(tokenizer, pool, [CELL], judge, tools=[JUPYTER])
    (first,) = await expander.expand(PROBLEM, root := Node("0"), 1)
    node = Node("0.1", 1, root, first)
    (second,) = await expander.expand(PROBLEM, node, 1)
    assert len(second.tool_calls) == 1
    # the first step's cell; again before the second step's, in an interpreter of its own; both are closed
    assert judge.codes == ["x", "x", "x"]
    one, two, three = judge.sessions
    assert one != two == three and judge.closed == [one, two]


async def test_paths_begin_with_an_environments_opening(tokenizer, pool: Rewards, tmp_path: Path) -> None:
    """The text of `reset` is in what the engine and the scorer get, and in the prompt of the tree."""
    (tmp_path / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, problem):\n"
        "        assert problem.query_id == 'q', 'no such level'\n"
        "        return 'Find my number.'\n"
        "    def step(self, text): return 'higher', 0.0, False\n"
    )
    expander, loop = make(
        tokenizer, pool, ["1"], guide="scores", environment=UserCode.model_validate(f"{tmp_path}/game.py:Game")
    )
    scored: list[Prefix] = []

    class Listening(LikelihoodScorer):
        async def score(self, prefixes: Sequence[Prefix]) -> list[float]:
            scored.extend(prefixes)
            return await super().score(prefixes)

    expander.values.scorer = Listening()
    (first,) = await expander.expand(PROBLEM, root := Node("0"), 1)
    await expander.expand(PROBLEM, Node("0.1", 1, root, first), 1)
    before, after = written(loop).seen
    assert "What is 2+2?\n\nFind my number.<|im_end|>" in tokenizer.decode(before)
    prompt_ids = await expander.prompt_ids(PROBLEM)
    assert before == prompt_ids and after[: len(before) + len(first.ids)] == [*prompt_ids, *first.ids]
    assert [prefix.prompt_ids.tolist() for prefix in scored] == [prompt_ids] * 2
    with pytest.raises(ExpansionSpoiled, match=r"r: game\.py:Game failed: .*no such level"):
        await expander.expand(replace(PROBLEM, query_id="r"), Node("0"), 1)


async def test_candidates_run_together(tokenizer, pool: Rewards) -> None:
    expander, loop = make(tokenizer, pool, [ANSWER])
    written(loop).go.clear()
    expanding = asyncio.create_task(expander.expand(PROBLEM, Node("0"), 16))
    async with asyncio.timeout(60):
        while len(written(loop).seen) < 16:
            await asyncio.sleep(0)
    written(loop).go.set()
    assert len(await expanding) == 16


def test_seeds_differ_by_place_and_depend_on_nothing_else() -> None:
    places = [("q", "0", 0), ("q", "0", 1), ("q", "0.1", 0), ("r", "0", 0)]
    seeds = {candidate_seed(3, *place) for place in places} | {candidate_seed(4, "q", "0", 0)}
    assert len(seeds) == 5 and all(0 <= seed < 2**31 for seed in seeds)
    assert candidate_seed(3, "q", "0", 0) == candidate_seed(3, "q", "0", 0)


def test_a_step_without_tokens_generated_none() -> None:
    assert Step("x").generated_tokens == 0
