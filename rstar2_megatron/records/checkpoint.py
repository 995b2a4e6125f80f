"""Checkpoints in RLinf's layout: {run}/checkpoints/global_step_N/{actor,data/data.pt}, and note.json beside them.

A checkpoint is written beside its final name and renamed when everything is on disk, so a directory named
global_step_N is always complete and a kill in the middle never costs the previous one. The note says what decides how
long the checkpoint is kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rstar2_megatron.records.disk import writing
from rstar2_megatron.records.whole_file import write_json

_NAME = re.compile(r"global_step_(\d+)")
_UNFINISHED = ".unfinished"
_NOTE = "note.json"


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """Scores of a checkpoint. The defaults are those of a checkpoint without a note."""

    updated: bool = True
    """Whether a step changed the weights since the previous checkpoint."""
    held_out: float | None = None
    """avg@k of these weights on the held-out problems."""
    pass_rate: float | None = None
    """Mean pass rate of the last steps, whose rollouts are from slightly older weights."""


def read_note(checkpoint: Path) -> CheckpointNote:
    """The note of a global_step_N directory."""
    path = checkpoint / _NOTE
    return CheckpointNote(**json.loads(path.read_text())) if path.is_file() else CheckpointNote()


def best_of(notes: Mapping[int, CheckpointNote]) -> int | None:
    """The best step: by held-out score if any checkpoint has one, else by pass rate; the newest of equals."""
    for name in ("held_out", "pass_rate"):
        scores = {step: getattr(note, name) for step, note in notes.items()}
        known = {step: score for step, score in scores.items() if score is not None}
        if known:
            return max(known, key=lambda step: (known[step], step))
    return None


def steps_to_keep(notes: Mapping[int, CheckpointNote], keep: int, *, best: bool, protected: Collection[int] = ()) -> set[int]:
    """Which of the checkpoints stay: the newest, the newest `keep` that hold an update, the best one, `protected`.

    A checkpoint without an update pushes no other out: it has the weights of an earlier one, or those of a ruined run.
    """
    steps = sorted(notes)
    kept = {step for step in protected if step in notes} | set(steps[-1:])
    kept.update([step for step in steps if notes[step].updated][-keep:])
    if best and (found := best_of(notes)) is not None:
        kept.add(found)
    return kept


def step_of(path: Path) -> int | None:
    """N of a directory global_step_N; None for another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def complete_checkpoints(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every complete checkpoint, oldest first."""
    found = []
    if checkpoints_dir.is_dir():
        for path in checkpoints_dir.iterdir():
            if (step := step_of(path)) is not None and path.is_dir():
                found.append((step, path))
    return sorted(found)


def find_resume(resume_dir: str | None, checkpoints_dir: Path) -> tuple[int, Path] | None:
    """The checkpoint that `runner.resume_dir` asks for, or None for a new run. Raises ValueError."""
    if resume_dir is None:
        return None
    if resume_dir == "auto":
        checkpoints = complete_checkpoints(checkpoints_dir)
        return checkpoints[-1] if checkpoints else None
    path = Path(resume_dir)
    step = step_of(path)
    if step is None or not (path / "actor").is_dir() or not (path / "data" / "data.pt").is_file():
        raise ValueError(
            f"runner.resume_dir={resume_dir} is not a checkpoint: expected a directory global_step_N with actor/ and "
            "data/data.pt in it; use `auto` for the newest of this experiment or null for a new run"
        )
    return step, path


def set_aside_behind(step: int, checkpoints_dir: Path, suffix: str) -> list[Path]:
    """Rename the checkpoints of later steps, which a run that goes on from `step` makes anew; returns where they are.

    As checkpoints of this run they would be the newest: what is saved next would be removed, and the next resume go to them.
    """
    later = [path for other, path in complete_checkpoints(checkpoints_dir) if other > step]
    return [path.rename(path.with_name(f"{path.name}.{suffix}")) for path in later]


@dataclass(frozen=True, slots=True)
class UnfinishedCheckpoint:
    """global_step_{step} under a temporary name; its model may not be written completely."""

    partial: Path
    step: int

    def publish(
        self, keep: int, note: CheckpointNote = CheckpointNote(), *, best: bool = False, protected: Collection[int] = ()
    ) -> Path:
        """Give it its name and note, once the model is written; then remove checkpoints that `steps_to_keep` does not name."""
        write_json(self.partial / _NOTE, asdict(note))
        final = self.partial.with_name(self.partial.name.removesuffix(_UNFINISHED))
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(final)
        self.partial.rename(final)
        checkpoints = dict(complete_checkpoints(final.parent))
        notes = {step: read_note(path) for step, path in checkpoints.items()}
        for step in checkpoints.keys() - steps_to_keep(notes, keep, best=best, protected=protected):
            # Under this name what an evaluation still reads on a shared disk is removed by the next save.
            gone = checkpoints[step].rename(checkpoints[step].with_name(checkpoints[step].name + _UNFINISHED))
            shutil.rmtree(gone, ignore_errors=True)
        return final

    def discard(self) -> None:
        """Remove it; the model must have been written."""
        shutil.rmtree(self.partial)


def begin_save(
    checkpoints_dir: Path, step: int, save_actor: Callable[[str], None], data_state: dict[str, Any]
) -> UnfinishedCheckpoint:
    """Write global_step_{step} under a temporary name; `save_actor(directory)` writes the model, or begins to."""
    partial = checkpoints_dir / f"global_step_{step}{_UNFINISHED}"
    for stale in checkpoints_dir.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(stale, ignore_errors=stale != partial)
    (partial / "data").mkdir(parents=True)
    save_actor(str(partial / "actor"))
    import torch  # here, because torch takes seconds to load, and finding checkpoints does not need it

    path = partial / "data" / "data.pt"
    with writing(path), path.open("wb") as file:
        torch.save(data_state, file)
        file.flush()
        os.fsync(file.fileno())
    return UnfinishedCheckpoint(partial, step)


def save(checkpoints_dir: Path, step: int, save_actor: Callable[[str], None], data_state: dict[str, Any], keep: int) -> Path:
    """Write global_step_{step}, with a `save_actor` that returns when the model is written; keep the newest `keep`."""
    return begin_save(checkpoints_dir, step, save_actor, data_state).publish(keep)


def load_data_state(checkpoint: Path) -> dict[str, Any]:
    """The `data_state` that `save` got."""
    import torch  # here, as above

    path = checkpoint / "data" / "data.pt"
    try:
        return torch.load(path, weights_only=False)
    except Exception as error:  # whatever unpickling a damaged file raises
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged, or of another version of this project; "
            "set runner.resume_dir to an earlier checkpoint, or to null to begin anew"
        ) from error
