"""Checkpoint directories: complete or absent, pruned, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.records import checkpoint
from rstar2_megatron.records.checkpoint import CheckpointNote


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
    assert checkpoint.find_resume(str(tmp_path / "global_step_2"), tmp_path) == (2, tmp_path / "global_step_2")
    assert checkpoint.find_resume(None, tmp_path) is None


def test_a_run_that_goes_on_from_an_earlier_step_keeps_what_it_saves(tmp_path: Path) -> None:
    """Steps 90 and 100 of the run that was left made those behind 60 the oldest, which went as soon as they were written."""
    for step in (60, 90, 100):
        checkpoint.save(tmp_path, step, write_actor, {"step": step}, keep=3)
    moved = checkpoint.set_aside_behind(60, tmp_path, "left")
    assert sorted(path.name for path in moved) == ["global_step_100.left", "global_step_90.left"]
    assert all((path / "actor" / "weights").is_file() for path in moved)
    assert checkpoint.set_aside_behind(60, tmp_path, "left") == []
    for step in (70, 80):
        checkpoint.save(tmp_path, step, write_actor, {"step": step}, keep=2)
    assert checkpoint.find_resume("auto", tmp_path) == (80, tmp_path / "global_step_80")
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path)] == [70, 80]


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


def test_steps_without_an_update_push_no_checkpoint_out(tmp_path: Path) -> None:
    """The run this was written for: steps 2 and 4 trained, 6 to 10 did not, and 6 had the best pass rate until then."""
    notes = {
        2: CheckpointNote(updated=True, pass_rate=0.55),
        4: CheckpointNote(updated=True, pass_rate=0.6),
        6: CheckpointNote(updated=False, pass_rate=0.0),
        8: CheckpointNote(updated=False, pass_rate=0.0),
    }
    assert checkpoint.steps_to_keep(notes, 2, best=True) == {2, 4, 8}
    assert checkpoint.steps_to_keep(notes, 1, best=False) == {4, 8}
    assert checkpoint.steps_to_keep(notes, 1, best=False, protected=[2, 3]) == {2, 4, 8}
    for step, note in notes.items():
        begun = checkpoint.begin_save(tmp_path, step, write_actor, {"step": step})
        begun.publish(2, note, best=True)
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path)] == [2, 4, 8]
    assert checkpoint.read_note(tmp_path / "global_step_4") == notes[4]


def test_the_best_checkpoint_stays_besides_the_newest() -> None:
    notes = {step: CheckpointNote(pass_rate=rate) for step, rate in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.6))}
    assert checkpoint.steps_to_keep(notes, 2, best=True) == {2, 3, 4}
    assert checkpoint.steps_to_keep(notes, 2, best=False) == {3, 4}
    held_out = {**notes, 1: CheckpointNote(pass_rate=0.2, held_out=0.4), 3: CheckpointNote(held_out=0.3)}
    assert checkpoint.best_of(held_out) == 1  # a held-out score counts more than any pass rate
    assert checkpoint.best_of({1: CheckpointNote(), 2: CheckpointNote()}) is None
    assert checkpoint.best_of({1: CheckpointNote(held_out=0.5), 2: CheckpointNote(held_out=0.5)}) == 2


def test_a_discarded_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.begin_save(tmp_path, 3, write_actor, {"step": 3}).discard()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "global_step_7").mkdir()
    with pytest.raises(ValueError, match=r"global_step_7 is not a checkpoint"):
        checkpoint.find_resume(str(tmp_path / "global_step_7"), tmp_path)
