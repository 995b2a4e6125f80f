"""When the benchmark of search says that its bar is reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.search_bars import CHOSEN, VOTES, report


def row(name: str, right: int, problems: int = 40) -> dict[str, Any]:
    scores = {str(i): float(i < right) for i in range(problems)}
    return {
        "name": name,
        "uses_answers": False,
        "value": right / problems,
        "low": 0.0,
        "high": 1.0,
        "scores": scores,
        "tokens": dict.fromkeys(scores, 100),
    }


@pytest.mark.parametrize(
    ("mcts", "greedy", "votes", "more", "passed"),
    [
        (30, 10, 12, 13, True),
        (30, 28, 12, 13, False),
        (30, 12, 28, 13, False),
        (30, 12, 13, 28, False),
        (12, 30, 30, 30, False),
    ],
)
def test_greedy_and_both_majorities_must_be_beaten(
    mcts: int, greedy: int, votes: int, more: int, passed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("greedy", greedy), row(CHOSEN, mcts), row(f"majority@{VOTES}", votes)]
    rows.append(row("sampling, majority@17", more))
    assert report(rows, tmp_path / "bars.json") == (0 if passed else 1)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["passed"] is passed
    against = line["against"]["greedy"]
    assert against["value"] == pytest.approx((mcts - greedy) / 40)
    assert against["low"] <= against["value"] <= against["high"]
    kept = json.loads((tmp_path / "bars.json").read_text())[0]["rows"]
    assert [r["tokens"] for r in kept] == [100, 100, 100, 100] and "scores" not in kept[0]


def test_a_result_takes_the_place_of_its_case_alone(tmp_path: Path) -> None:
    path = tmp_path / "bars.json"
    for case, right in (("seed 0", 10), ("seed 1", 12), ("seed 0", 30)):
        rows = [row("greedy", 5), row(CHOSEN, right), row(f"majority@{VOTES}", 5)]
        report(rows, path, case)
    found = {case["case"]: case["rows"][1]["value"] for case in json.loads(path.read_text())}
    assert found == {"seed 1": 12 / 40, "seed 0": 30 / 40}
