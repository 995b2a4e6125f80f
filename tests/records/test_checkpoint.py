"""Checkpoint directories: complete or absent, pruned, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.records import checkpoint


def write_actor(directory: str) -> None:
    Path(directory).mkdir(parents=True)
    (Path(directory) / "weights").write_text("w")


def test_saved_found_loaded_and_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, write_actor, {"step": step}, keep=2)
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path)] == [2, 3]
    found = checkpoint.find_resume("auto", tmp_path)
    assert found == (3, tmp_path / "global_step_3")
    assert checkpoint.load_data_state(found[1]) == {"step": 3}
    assert checkpoint.find_resume(str(tmp_path / "global_step_2"), tmp_path) == (
        2,
        tmp_path / "global_step_2",
    )
    assert checkpoint.find_resume(None, tmp_path) is None


def test_a_save_that_fails_costs_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, write_actor, {"step": 1}, keep=1)

    def fails(directory: str) -> None:
        write_actor(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 2, fails, {"step": 2}, keep=1)
    assert checkpoint.find_resume("auto", tmp_path) == (1, tmp_path / "global_step_1")
    checkpoint.save(tmp_path, 2, write_actor, {"step": 2}, keep=1)  # over what the failure left
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path)] == [2]


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "global_step_7").mkdir()
    with pytest.raises(ValueError, match=r"global_step_7 is not a checkpoint"):
        checkpoint.find_resume(str(tmp_path / "global_step_7"), tmp_path)
