"""The table of results, and the command's answers to bad input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rstar2_megatron.evaluation.scores import same_answer
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.search.__main__ import _results, guided, main
from rstar2_megatron.search.beam import Attempts
from rstar2_megatron.search.choose import Solution
from rstar2_megatron.search.table import SearchedSet, paired_difference, read_set, render, results
from rstar2_megatron.search.tree_file import tree_row
from rstar2_megatron.settings.schema import SearchSettings
from rstar2_megatron.trajectory import Problem
from tests.search.scripted import finished, settings


def leaf(tag: str, answer: str, value: float, reward: float) -> Solution:
    return Solution(tag, answer, value, reward)


FOUND = {
    "a": [leaf("0.1", "1", 0.9, 1.0), leaf("0.2", "2", 0.1, 0.0), leaf("0.3", "2", 0.0, 0.0)],
    "b": [leaf("0.1", "7", -0.5, 0.0)],
    "c": [],
}
TOKENS = {"a": 30, "b": 60, "c": 90}


def test_every_choice_is_a_row() -> None:
    rows = results("mcts", SearchedSet(FOUND, TOKENS), same_answer, by_answers=False)
    scores = {row.name: row.scores for row in rows}
    assert scores == {
        "mcts, best value": {"a": 1.0, "b": 0.0, "c": 0.0},
        "mcts, majority": {"a": 0.0, "b": 0.0, "c": 0.0},
        "mcts, value-weighted": {"a": 0.0, "b": 0.0, "c": 0.0},  # 0.95 against 0.55 + 0.5
        "mcts, any right": {"a": 1.0, "b": 0.0, "c": 0.0},
    }
    assert [row.ceiling for row in rows] == [False, False, False, True]
    guided_rows = results("mcts", SearchedSet(FOUND, TOKENS), same_answer, by_answers=True)
    assert all(row.ceiling for row in guided_rows)  # which solutions vote is decided by the answers too


def test_sampling_has_the_scores_of_its_attempts() -> None:
    rows = results("sampling", SearchedSet(FOUND, TOKENS, dict.fromkeys("abc", 3)), same_answer, by_answers=True)
    assert {row.name: sum(row.scores.values()) for row in rows} == {
        "sampling, avg@1": pytest.approx(1 / 3),
        "sampling, majority@3": 0.0,
        "sampling, any of 3": 1.0,
    }
    assert rows[0].tokens == {"a": 10, "b": 20, "c": 30}


def test_attempts_count_up_to_the_tokens_of_the_search() -> None:
    """Attempts of 2 and 1 generated tokens in turn, of which a right one is the last."""
    search = Attempts(settings(rollouts=4, depth=2))
    (root,) = search.wanted()
    lengths, rewards = (2, 1, 2, 1), (0.0, 0.0, 0.0, 1.0)
    search.grow(root, [finished("!", 1.0, r) for r in rewards])
    for node, n in zip(root.children or [], lengths, strict=True):
        assert node.step is not None
        node.step.mask = np.ones(n, np.uint8)
    problem = Problem("q", [{"role": "user", "content": "?"}], ["!"])
    row = tree_row(problem, search, "sampling", 1.0)
    for budget, attempts, tokens in ((None, 4, 6), ({"q": 6}, 4, 6), ({"q": 5}, 3, 5), ({"q": 4}, 2, 3), ({"q": 1}, 1, 2)):
        searched = read_set([row], {"q"}, budget)
        assert (searched.attempts, searched.tokens) == ({"q": attempts}, {"q": tokens})
        assert len(searched.found["q"]) == attempts
    assert read_set([row], {"other"}).found == {}


def test_rendered_against_greedy() -> None:
    greedy = results("greedy", SearchedSet(FOUND, TOKENS, dict.fromkeys("abc", 1)), same_answer, by_answers=True)
    rows = greedy + results("mcts", SearchedSet(FOUND, TOKENS), same_answer, by_answers=True)
    text = render(rows, 3)
    assert "mcts, best value (uses the answers)" in text and text.splitlines()[2].startswith("greedy")
    assert "33.3 [" in text and "60" in text
    assert "right of 3, %" in text and "unfinished" not in text
    text = render(rows, 5)
    assert "right of 3, %" in text and text.endswith("\n2 of 5 problems are unfinished and not counted")


@pytest.mark.parametrize(
    ("chosen", "uses_answers"),
    [
        ({"guide": "answers"}, True),
        ({"guide": "scores"}, False),
        ({"guide": "scores", "more_rollouts": 4}, True),  # problems without a right solution get them
        ({"guide": "scores", "more_rollouts": 4, "mode": "beam"}, False),  # which has no rollouts
    ],
)
def test_a_choice_says_that_the_answers_steered_its_search(chosen: dict[str, Any], uses_answers: bool, tmp_path: Path) -> None:
    search = Attempts(settings(rollouts=1, depth=2))
    (root,) = search.wanted()
    search.grow(root, [finished("!", 1.0, 1.0)])
    problem = Problem("q", [{"role": "user", "content": "?"}], ["!"])
    write_jsonl(tmp_path / "mcts.jsonl", [tree_row(problem, search, "mcts", 1.0)])
    chosen_settings = SearchSettings.model_validate(chosen)
    rows = _results("mcts", chosen_settings, [problem], tmp_path, SimpleNamespace(equal=same_answer), None)  # type: ignore[arg-type]
    assert {row.name: row.ceiling for row in rows}["mcts, majority"] == uses_answers


def test_paired_differences() -> None:
    first, second = ({str(i): float(i % 4 > 0) for i in range(80)}, {str(i): float(i % 4 > 1) for i in range(80)})
    difference = paired_difference(first, second)
    assert difference.value == 0.25 and 0.1 < difference.low < 0.25 < difference.high < 0.4
    same = paired_difference(first, first)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    with pytest.raises(ValueError, match="no problem in common"):
        paired_difference(first, {"x": 1.0})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--depth", "0"], "search.depth"),
        (["--candidates", "0"], "search.candidates"),
        (["--model", "nowhere"], "neither a Hugging Face directory"),
        (["--data", "missing.jsonl"], "missing.jsonl does not exist"),
        (["--mode", "beam", "search.guide=answers"], "search.guide=scores or answers+scores"),
        (["search.rollout=3"], "search.rollouts"),
        (["--compare", "search.mode=sampling"], "set search.mode=mcts or beam, or leave --compare out"),
    ],
)
def test_bad_input_ends_with_2(
    words: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "6*7?", "solutions": ["42"], "query_id": "q"}) + "\n")
    assert main(["--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_problems_are_counted_in_each_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files have one name, so their problems are named by their directories too."""
    paths = [tmp_path / name / "data.jsonl" for name in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text((json.dumps({"prompt": "6*7?", "solutions": ["42"]}) + "\n") * 3)
    searched: list[str] = []
    monkeypatch.setattr(
        "rstar2_megatron.search.__main__.run", lambda problems, *_, **__: searched.extend(p.query_id for p in problems)
    )
    main(["--model", str(model), "--data", *map(str, paths), "--problems", "2", "--out", str(tmp_path / "out")])
    assert searched == ["a-data-1", "a-data-2", "b-data-1", "b-data-2"]


def test_a_problem_without_an_answer_cannot_be_guided_by_answers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "6*7?", "solutions": []}) + "\n")
    assert main(["--model", str(model), "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "data.jsonl:1: 'solutions' must be a non-empty list of answers" in capsys.readouterr().err


def test_guides() -> None:
    assert guided(SearchSettings()).guide == "answers"
    assert guided(SearchSettings(mode="beam")).guide == "scores"
    assert guided(SearchSettings(reward_model="x")).guide == "scores"
    for named in (SearchSettings(guide="answers+scores"), SearchSettings(guide="answers+scores", reward_model="x")):
        assert guided(named).guide == "answers+scores"
