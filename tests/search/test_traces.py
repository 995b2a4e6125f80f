"""SFT conversations from trees: the best right solutions, token for token what the policy wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.search.__main__ import run
from rstar2_megatron.search.expand import Expander
from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.traces import best_right, conversation
from rstar2_megatron.search.tree import Node
from rstar2_megatron.search.values import Values
from rstar2_megatron.settings.schema import AgentLoopSettings, RewardSettings, SearchSettings
from rstar2_megatron.trajectory import Problem, ToolCall, ToolOutcome
from tests.e2e.runs import ROOT
from tests.rollout.written import ANSWER, PROBLEM, call, make_loop
from tests.search.scripted import drive, finished, name, settings
from tests.search.written_trees import PROMPT, write_trees


def test_two_right_solutions_of_the_highest_mean_q() -> None:
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
    assert [name(leaf) for leaf in best_right(search.tree, 4)] == ["b0", "b1", "a0"]


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


@pytest.mark.parametrize("own", [False, True])
def test_no_rows_are_written_where_an_environment_answers(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    """The tree file is there already; its steps have the texts of the turns, not those of the answers."""
    environment = UserCode(reference=f"{ROOT}/examples/extend/game.py:HigherLower") if own else None
    model = SimpleNamespace(model_path=tokenizer.name_or_path)
    sampling: Any = SimpleNamespace(
        agentloop=AgentLoopSettings(environment=environment), rollout=SimpleNamespace(model=model), reward=RewardSettings()
    )
    write_trees(tmp_path / "mcts.jsonl", tokenizer)
    problems = [Problem(f"q{i}", [{"role": "user", "content": PROMPT}], ["17"]) for i in range(4)]
    searching = SearchSettings(guide="answers")
    done = lambda *_, **__: ({"mcts": searching}, {})  # noqa: E731
    monkeypatch.setattr("rstar2_megatron.search.session.search_problems", done)
    assert run(problems, sampling, searching, tmp_path, compare=False) == 0
    assert (tmp_path / "mcts.sft.jsonl").exists() is not own
    assert ("no rows for SFT: what game.py:HigherLower answers" in capsys.readouterr().out) is own
