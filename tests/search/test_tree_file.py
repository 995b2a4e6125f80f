"""Trees on disk: a killed search grows to the same tree; wrong and broken files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rstar2_megatron.evaluation.samples import SamplesError
from rstar2_megatron.search.choose import solutions
from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.step import Step, path_trajectory, step_of
from rstar2_megatron.search.tree_file import TreeFile, tree_of, tree_row
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome
from tests.search.scripted import drive, finished, settings

PROBLEM = Problem("q", [{"role": "user", "content": "What is 6*7?"}], ["42"])


def steps_of(path: str) -> list[Step]:
    if path:
        return [finished("!", 1.0 if path == "b" else -1.0, float(path == "b"))]
    call = ToolCall("python", {"code": "print(42)"}, ToolOutcome.OK, "stdout: 42", 0.1)
    return [Step(text, [1, 2, 3], [1, 1, 0], [-0.1, -0.2, 0.0], [call], value=0.25) for text in ("a", "b")]


def search() -> MCTS:
    grown = MCTS(settings())
    drive(grown, steps_of)
    return grown


def test_a_row_holds_the_whole_tree(tmp_path: Path) -> None:
    file = TreeFile(tmp_path / "mcts.jsonl", {"seed": 1})
    assert file.open([PROBLEM]) == (set(), {})
    grown = search()
    file.finish(tree_row(PROBLEM, grown, "mcts", 1.5))
    ((_, row),) = file.rows()
    again = tree_of(row)
    for ours, theirs in zip(grown.tree.root.walk(), again.root.walk(), strict=True):
        assert (ours.tag, ours.visits, ours.total, ours.value, ours.end) == (
            theirs.tag, theirs.visits, theirs.total, theirs.value, theirs.end,
        )  # fmt: skip
        assert ours.step == theirs.step
    assert solutions(again, "mcts") == solutions(grown.tree, "mcts")
    assert row["chosen"] == "0.2.1" and row["generated_tokens"] == 4
    assert TreeFile(tmp_path / "mcts.jsonl", {"seed": 1}).open([PROBLEM])[0] == {"q"}


def test_a_killed_search_goes_on_from_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "mcts.jsonl"
    file = TreeFile(path, {"seed": 1})
    file.open([PROBLEM])
    file.record("q", "0", steps_of(""))
    with file.journal_path.open("a") as torn:
        torn.write('{"query_id": "q", "tag": "0.1", "st')
    _, recorded = TreeFile(path, {"seed": 1}).open([PROBLEM])
    assert list(recorded["q"]) == ["0"] and recorded["q"]["0"] == steps_of("")
    again = TreeFile(path, {"seed": 1})
    again.open([PROBLEM])
    again.finish(tree_row(PROBLEM, search(), "mcts", 1.0))
    assert TreeFile(path, {"seed": 1}).open([PROBLEM]) == ({"q"}, {})
    again.close(complete=True)
    assert not again.journal_path.exists()


def test_a_file_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mcts.jsonl"
    file = TreeFile(path, {"depth": 16})
    file.open([PROBLEM])
    file.record("q", "0", steps_of(""))
    with pytest.raises(SamplesError, match="depth: 16 then, 8 now"):
        TreeFile(path, {"depth": 8}).open([PROBLEM])
    file.finish(tree_row(PROBLEM, search(), "mcts", 1.0))
    other = Problem("q", PROBLEM.prompt, ["43"])
    with pytest.raises(SamplesError, match="another problem under query_id 'q'"):
        TreeFile(path, {"depth": 16}).open([other])


@pytest.mark.parametrize("broken", ["no json\n", '{"query_id": "q"}\n'])
def test_a_broken_row_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "mcts.jsonl"
    file = TreeFile(path, {})
    file.open([PROBLEM])
    file.finish(tree_row(PROBLEM, search(), "mcts", 1.0))
    path.write_text(path.read_text() + broken)
    with pytest.raises(SamplesError, match=r"mcts.jsonl:2: .*repair or remove this line"):
        TreeFile(path, {}).open([PROBLEM])
    path.write_text("")
    file.journal_path.write_text(json.dumps({"query_id": "q", "tag": "0", "steps": [{"ids": 1}]}) + "\n")
    with pytest.raises(SamplesError, match=r"expansions.jsonl:1"):
        TreeFile(path, {}).open([PROBLEM])


def test_steps_and_trajectories_are_inverse() -> None:
    first, second = steps_of("")
    last = Step("x", [7], [1], [-1.0], ending=FinishReason.ANSWERED, answer="42", reward=1.0)
    path = path_trajectory(PROBLEM, [first, second, last], np.array([5, 6], np.int32))
    path.check()
    assert path.response_ids.tolist() == [1, 2, 3, 1, 2, 3, 7] and path.num_trained_tokens == 5
    assert path.finish_reason is FinishReason.ANSWERED and path.reward == 1.0
    assert step_of(path, 6, 2) == last
