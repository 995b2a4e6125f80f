"""Pass counts and which problems they leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.data.difficulty import PassCount, difficulty_report, dropped_problems, pass_counts, render_report
from rstar2_megatron.runs.filter_command import main
from rstar2_megatron.settings.schema import DifficultyFilterSettings
from rstar2_megatron.trajectory import Problem
from tests.runs.inputs.models import write_directory

PROBLEMS = [Problem(name, [{"role": "user", "content": name}], ["1"]) for name in ("easy", "middle", "hard", "spoiled")]
REWARDS = [*[("easy", 1.0)] * 4, *[("middle", r) for r in (1.0, 0.0, 0.0, 1.0)], *[("hard", 0.0)] * 4, *[("spoiled", 1.0)] * 3]


def dropped(**options: bool) -> dict[str, str]:
    return dropped_problems(pass_counts(PROBLEMS, REWARDS), DifficultyFilterSettings.model_validate(options), wanted=4)


def test_counts_are_in_the_order_of_the_problems() -> None:
    assert pass_counts(PROBLEMS, reversed(REWARDS)) == [
        PassCount("easy", 4, 4),
        PassCount("middle", 2, 4),
        PassCount("hard", 0, 4),
        PassCount("spoiled", 3, 3),
    ]


def test_always_solved_is_dropped_and_never_solved_if_asked() -> None:
    assert dropped() == {"easy": "always solved"}
    assert dropped(drop_never_solved=True) == {"easy": "always solved", "hard": "never solved"}
    assert dropped(drop_always_solved=False) == {}


def test_attempts_that_the_infrastructure_spoiled_decide_nothing() -> None:
    assert "spoiled" not in dropped(drop_never_solved=True)
    assert dropped_problems([PassCount("a", 0, 0)], DifficultyFilterSettings(drop_never_solved=True), wanted=4) == {}


def test_report() -> None:
    report = difficulty_report(pass_counts(PROBLEMS, REWARDS), dropped(), 4)
    assert (report["rows_in"], report["rows_out"], report["dropped"]) == (4, 3, {"always solved": 1})
    assert report["problems_by_times_solved"] == {"0": 1, "1": 0, "2": 1, "3": 0, "4": 1}
    assert report["problems_with_spoiled_attempts"] == 1 and report["pass_rate"] == 9 / 15
    assert "4 problems x 4 attempts, pass rate 0.600" in render_report(report)


def test_out_may_be_where_one_stands_and_paths_may_have_an_apostrophe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "problems.jsonl").write_text('{"prompt": "1 + 1?", "solutions": ["2"]}\n')
    monkeypatch.chdir(here)
    words = ["--out", ".", "--data", "problems.jsonl", "--config", "rstar2-tiny-cpu"]
    words += ["cold_start.builder=null", "cold_start.enabled=False", "data.val_data_paths=[]"]
    (tmp_path / ".here.lock").mkdir()  # so that the directory cannot be held
    assert main(["--model", str(write_directory(here / "model")), *words]) == 2
    assert f"runner.output_dir={tmp_path} cannot be written" in capsys.readouterr().err
    assert main(["--model", "Anna's", *words]) == 2
    assert "rollout.model.model_path=Anna's is not a directory" in capsys.readouterr().err


def test_command_line_answers_bad_input_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text('{"prompt": "1 + 1?", "solutions": ["2"]}\n')
    words = ["--data", str(data), "--out", str(tmp_path / "out"), "--config", "rstar2-tiny-cpu"]
    off = ["cold_start.builder=null", "cold_start.enabled=False"]
    assert main(["--model", str(tmp_path / "nowhere"), *words, *off]) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    assert main(["--model", str(tmp_path), *words, *off, "difficulty_filter.samples=3"]) == 2
    assert "the nearest valid key is difficulty_filter.num_samples" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
