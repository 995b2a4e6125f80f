"""SFT conversations from trees: the best right solutions, token for token what the policy wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.report.trees import tree_groups
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.search import traces
from rstar2_megatron.search.__main__ import run
from rstar2_megatron.search.expand import Expander
from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.solver import Solver
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.traces import best_right, conversation
from rstar2_megatron.search.tree import Node
from rstar2_megatron.search.tree_file import TreeFile, tree_of
from rstar2_megatron.search.values import Values
from rstar2_megatron.settings.schema import AgentLoopSettings, RewardSettings, SearchSettings
from rstar2_megatron.trajectory import ToolCall, ToolOutcome
from tests.e2e.runs import ROOT, read_jsonl
from tests.rollout.written import ANSWER, PROBLEM, call, make_loop
from tests.search.scripted import drive, finished, name, settings


def test_two_right_solutions_of_the_highest_mean_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a one of two is right, under b both, under c the only one but with a failed call."""

    def propose(path: str) -> list[Step]:
        right = {"a": (1, 0), "b": (1, 1), "c": (1,)}
        if path:
            return [finished(str(i), 2.0 * r - 1, float(r)) for i, r in enumerate(right[path])]
        failed = ToolCall("python", {}, ToolOutcome.ERROR, "no")
        return [Step("a"), Step("b"), Step("c", tool_calls=[failed])]

    search = MCTS(settings(rollouts=9, depth=2))
    drive(search, propose)
    assert [name(leaf) for leaf in best_right(search.tree)] == ["b0", "b1"]
    # c ties with b and is then dropped; a's mean is 0.5
    monkeypatch.setattr(traces, "BEST", 4)
    assert [name(leaf) for leaf in best_right(search.tree)] == ["b0", "b1", "a0"]


async def test_a_conversation_renders_to_the_paths_tokens(tokenizer) -> None:
    loop = make_loop(tokenizer, [call(), ANSWER])
    searching = SearchSettings(guide="answers")
    with Rewards(RewardSettings()) as pool:
        expander = Expander(loop, Values(searching, pool, None), searching)
        (first,) = await expander.expand(PROBLEM, root := Node("0"), 1)
        (last,) = await expander.expand(PROBLEM, Node("0.1", 1, root, first), 1)
    segments = conversation(loop.template, PROBLEM, [first, last])
    assert [trained for _, trained in segments] == [False, True, False, True]
    text = "".join(text for text, _ in segments)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [*loop.template.prompt_ids(PROBLEM), *first.ids, *last.ids]


def sampling_of(tokenizer: Any, agentloop: AgentLoopSettings) -> Any:
    model = SimpleNamespace(model_path=tokenizer.name_or_path)
    return SimpleNamespace(agentloop=agentloop, rollout=SimpleNamespace(model=model), reward=RewardSettings())


def game() -> UserCode:
    return UserCode(reference=f"{ROOT}/examples/extend/game.py:HigherLower")


def test_what_an_environment_answered_is_in_the_rows_and_on_the_page(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(tokenizer, ["I say 3", call(), "it is 4"], environment=game())
    searching = SearchSettings(guide="answers", rollouts=1, candidates=1, depth=3)
    file = TreeFile(tmp_path / "mcts.jsonl", {})
    file.open([PROBLEM])
    with Rewards(RewardSettings(function="environment")) as pool:
        expander = Expander(loop, Values(searching, pool, None), searching)
        asyncio.run(Solver([PROBLEM], searching, file, {}).run([expander], 1))
    done = lambda *_, **__: ({"mcts": searching}, {})  # noqa: E731
    monkeypatch.setattr("rstar2_megatron.search.session.search_problems", done)
    assert run([PROBLEM], sampling_of(tokenizer, loop.settings), searching, tmp_path, compare=False) == 0

    (row,) = read_jsonl(tmp_path / "mcts.sft.jsonl")
    prompt, *response = row["segments"]
    assert "What is 2+2?\n\nYou have 4 guesses.<|im_end|>" in prompt[0]
    assert "higher" in response[1][0] and "<tool_response>" in response[3][0]
    ids = tokenizer.encode("".join(text for text, _ in response), add_special_tokens=False)
    ((_, tree),) = file.rows()
    assert ids == [token for step in tree_of(tree).leaves()[0].steps for token in step.ids]
    ((group,), _, _) = tree_groups(tmp_path / "mcts.jsonl", 10**6)
    assert [part["kind"] for tag in group["chosen"] for part in group["nodes"][tag]["parts"]] == [
        "turn", "observation", "turn", "tool", "turn",
    ]  # fmt: skip
