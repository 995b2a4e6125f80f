"""Checkpoints in RLinf's layout: {run}/checkpoints/global_step_N/{actor,data/data.pt}.

A checkpoint is written beside its final name and renamed when everything is on disk, so a directory named
global_step_N is always complete and a kill in the middle never costs the previous one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"global_step_(\d+)")
_UNFINISHED = ".unfinished"


def complete_checkpoints(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every complete checkpoint, oldest first."""
    found = []
    if checkpoints_dir.is_dir():
        for path in checkpoints_dir.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match.group(1)), path))
    return sorted(found)


def find_resume(resume_dir: str | None, checkpoints_dir: Path) -> tuple[int, Path] | None:
    """The checkpoint that `runner.resume_dir` asks for, or None to start anew. Raises ValueError."""
    if resume_dir is None:
        return None
    if resume_dir == "auto":
        checkpoints = complete_checkpoints(checkpoints_dir)
        return checkpoints[-1] if checkpoints else None
    path = Path(resume_dir)
    match = _NAME.fullmatch(path.name)
    if not match or not (path / "actor").is_dir() or not (path / "data" / "data.pt").is_file():
        raise ValueError(
            f"runner.resume_dir={resume_dir} is not a checkpoint: expected a directory global_step_N with actor/ and "
            "data/data.pt in it; use `auto` for the newest of this experiment or null to start anew"
        )
    return int(match.group(1)), path


@dataclass(frozen=True, slots=True)
class UnfinishedCheckpoint:
    """global_step_{step} under another name, whose model may still be being written."""

    checkpoints_dir: Path
    step: int
    keep: int

    def publish(self) -> Path:
        """Give it its name, once the model is written; then keep only the newest `keep` checkpoints."""
        final = self.checkpoints_dir / f"global_step_{self.step}"
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(final)
        final.with_name(final.name + _UNFINISHED).rename(final)
        for _, old in complete_checkpoints(self.checkpoints_dir)[: -self.keep]:
            shutil.rmtree(old)
        return final


def begin_save(
    checkpoints_dir: Path, step: int, save_actor: Callable[[str], None], data_state: dict[str, Any], keep: int
) -> UnfinishedCheckpoint:
    """Write global_step_{step} but for its name; `save_actor(directory)` writes the model, or starts to."""
    partial = checkpoints_dir / f"global_step_{step}{_UNFINISHED}"
    for stale in checkpoints_dir.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(stale)
    (partial / "data").mkdir(parents=True)
    save_actor(str(partial / "actor"))
    import torch  # here: it takes seconds, and finding checkpoints does not need it

    with (partial / "data" / "data.pt").open("wb") as file:
        torch.save(data_state, file)
        file.flush()
        os.fsync(file.fileno())
    return UnfinishedCheckpoint(checkpoints_dir, step, keep)


def save(
    checkpoints_dir: Path, step: int, save_actor: Callable[[str], None], data_state: dict[str, Any], keep: int
) -> Path:
    """Write global_step_{step}, with a `save_actor` that returns when the model is written."""
    return begin_save(checkpoints_dir, step, save_actor, data_state, keep).publish()


def load_data_state(checkpoint: Path) -> dict[str, Any]:
    """What `save` got as `data_state`."""
    import torch  # here, as above

    return torch.load(checkpoint / "data" / "data.pt", weights_only=False)
