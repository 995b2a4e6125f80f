"""Search trees on the trajectory page, as a browser shows them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.report.trajectories import main
from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree_file import tree_row
from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome
from tests.report.chromium import document, needs_chromium, screenshot
from tests.search.scripted import drive, settings

ATTACK = "</script><script>document.title='pwned'</script>"


def propose(path: str) -> list[Step]:
    rng = random.Random(path)
    if len(path) == 2:
        right = path == "ba"
        return [
            Step("!", ending=FinishReason.ANSWERED, answer="42" if right else "41", reward=float(right), value=2.0 * right - 1)
        ]
    steps = []
    for letter in "abc":
        outcome = ToolOutcome.ERROR if rng.random() < 0.3 else ToolOutcome.OK
        call = ToolCall("python", {"code": f"print(6*7)  # {letter}", "input": ""}, outcome, f"stdout: {ATTACK}", 0.1)
        steps.append(Step(letter, tool_calls=[call], value=0.5))
    return steps


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("a-search")
    file = JsonlFile(directory / "mcts.jsonl")
    for number in range(2):
        search = MCTS(settings(rollouts=12))
        drive(search, propose)
        problem = Problem(f"q{number}", [{"role": "user", "content": "What is 6*7?"}], ["42"])
        file.append(tree_row(problem, search, "mcts", 1.0))
    return directory


@needs_chromium
def test_the_page_opens_the_chosen_path(run: Path, tmp_path: Path) -> None:
    assert main([str(run)]) == 0
    page = run / "trajectories.html"
    html = document(page, "", tmp_path)
    assert "pwned" not in html.partition("<title>")[2].partition("</title>")[0]
    assert html.count('class="node chosen" open=""') == 2 * 4  # root, b, ba, its answer
    assert html.count('class="node"') == 2 * 4  # their siblings, closed
    for text in ("N 9", "Q 0.", "value 0.500", "print(6*7)  # b", "answer 42", "expansions"):
        assert text in html, text
    target = tmp_path / "page.png"
    screenshot(page, "", tmp_path / "profile", target)
    assert target.stat().st_size > 20_000


def test_a_broken_tree_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "mcts.jsonl").read_text().splitlines()
    (tmp_path / "mcts.jsonl").write_text("\n".join([lines[0], '{"query_id": "q1"}', "no json"]) + "\n")
    assert main([str(tmp_path)]) == 0
    assert "2 lines could not be read (first: 2)" in capsys.readouterr().err
    (tmp_path / "mcts.jsonl").write_text("no json\n")
    assert main([str(tmp_path)]) == 2
    assert "holds no trees" in capsys.readouterr().err
