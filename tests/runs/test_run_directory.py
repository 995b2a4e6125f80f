"""What a run does with the directory of earlier runs of its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rstar2_megatron.data.loader import EpochsOver
from rstar2_megatron.records import checkpoint
from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.runs.base_run import BaseRun, StopSignals
from rstar2_megatron.settings.load import load


def begun(output: Path, *changes: str, total_steps: int = 200) -> tuple[int, Path] | None:
    words = [f"runner.output_dir={output}", "runner.experiment_name=run", *changes]
    run = BaseRun(load("rstar2-tiny-cpu", words).settings, StopSignals())
    try:
        return run.begin(total_steps)
    finally:
        run.close()


def save(output: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(output / "run" / "checkpoints", step, lambda path: Path(path).mkdir(parents=True), {}, keep=9)


def test_from_an_earlier_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 60, 90, 100)
    kept = tmp_path / "run" / "checkpoints"
    assert begun(tmp_path, f"runner.resume_dir={kept / 'global_step_60'}") == (60, kept / "global_step_60")
    assert "checkpoints behind step 60 are of the steps that are made again: moved to" in capsys.readouterr().out
    assert [step for step, _ in checkpoint.complete_checkpoints(kept)] == [60]
    assert len(list(kept.glob("global_step_*.*"))) == 2
    save(tmp_path, 70)
    assert begun(tmp_path, f"runner.resume_dir={kept / 'global_step_60'}") == (70, kept / "global_step_70")  # after a kill
    assert f"going on behind {kept / 'global_step_60'}; to begin there again" in capsys.readouterr().out
    shutil.rmtree(kept / "global_step_60")  # pruned meanwhile
    assert begun(tmp_path, f"runner.resume_dir={kept / 'global_step_60'}") == (70, kept / "global_step_70")
    monkeypatch.setenv("RSTAR2_CALLED_FROM", str(tmp_path))  # and written as the user did, who stands there
    assert begun(tmp_path, "runner.resume_dir=run/checkpoints/global_step_60") == (70, kept / "global_step_70")
    save(tmp_path, 60)
    capsys.readouterr()
    assert begun(tmp_path) == (70, kept / "global_step_70")
    assert capsys.readouterr().out == ""
    assert begun(tmp_path, f"runner.resume_dir={kept / 'global_step_60'}") == (60, kept / "global_step_60")


def test_a_relative_checkpoint_counts_from_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 60)
    (tmp_path / "auto").mkdir()  # `auto` is no path
    monkeypatch.setenv("RSTAR2_CALLED_FROM", str(tmp_path))
    kept = tmp_path / "run" / "checkpoints" / "global_step_60"
    assert begun(tmp_path, "runner.resume_dir=run/checkpoints/global_step_60") == (60, kept)
    assert begun(tmp_path) == (60, kept)


def test_a_run_without_a_checkpoint_is_moved_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert begun(tmp_path) is None
    assert "(it has no checkpoint to resume from); starting a new one" in capsys.readouterr().out
    assert len(list(tmp_path.glob("run.*"))) == 1


def test_a_run_that_a_condition_ended_goes_on_when_the_condition_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 3)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3, "rollout/pass_rate": 0.86}\n')
    finished = '{"step": 3, "condition": "rollout/pass_rate >= 0.85 1 times (0.86)", "seconds": 1}'
    for bound, resumed in ((0.95, True), (0.85, False)):
        (tmp_path / "run" / "finished.json").write_text(finished)
        found = begun(tmp_path, f"runner.stop_when=[{{metric: rollout/pass_rate, at_least: {bound}}}]")
        assert (found is not None) == resumed
    assert "(it finished with step 3)" in capsys.readouterr().out


def test_a_run_whose_epochs_are_over_has_finished(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3}\n')
    for epochs, resumed in ((2, True), (1, False)):
        write_json(tmp_path / "run" / "finished.json", {"step": 3, "condition": str(EpochsOver(1)), "seconds": 1})
        assert (begun(tmp_path, f"runner.max_epochs={epochs}") is not None) == resumed
