"""The files that a reinforcement-learning run extends at every step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.rollout_log import rollout_rows
from rstar2_megatron.records.samples import ShownGroup, group_rows
from rstar2_megatron.records.trajectory_files import rollouts_path, write_groups
from rstar2_megatron.settings.schema import RunnerSettings
from rstar2_megatron.trajectory import Group


class RunFiles:
    """metrics.jsonl, trajectories.jsonl and, when asked for, rollouts.jsonl and rollouts/ of a run's directory."""

    def __init__(self, directory: Path, runner: RunnerSettings) -> None:
        self.metrics = JsonlFile(directory / "metrics.jsonl")
        self._trajectories = JsonlFile(directory / "trajectories.jsonl")
        self._rollouts = JsonlFile(directory / "rollouts.jsonl")
        self._tokens = directory / "rollouts"
        self._logs = directory / "logs"
        self._runner, self._max_bytes = runner, runner.max_file_mb * 2**20

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after `step`, that of the checkpoint: a resumed run repeats these steps."""
        for file in (self.metrics, self._trajectories, self._rollouts):
            file.truncate_after(step)

    def append(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group], shown: Sequence[ShownGroup]) -> None:
        """Write one step; `metrics` become its row of metrics.jsonl."""
        self.metrics.append({**metrics, "step": step})
        self._trajectories.append(*(row for group in shown for row in group_rows(step, group)))
        if self._runner.save_rollouts:
            self._rollouts.append(*rollout_rows(step, groups))
        if self._runner.save_rollout_tokens:
            write_groups(rollouts_path(self._tokens, step), groups)
            if (kept := self._runner.keep_rollouts) is not None:
                rollouts_path(self._tokens, step - kept).unlink(missing_ok=True)
        for file in (self._trajectories, self._rollouts):
            file.keep_newest(self._max_bytes)
        for log in self._logs.glob("*.log"):
            rotate_log(log, self._max_bytes)


def rotate_log(path: Path, max_bytes: int) -> None:
    """Move the text of a log larger than `max_bytes` to `NAME.1`, which it replaces.

    Its writers append, so they keep the file open; what they write during the copy may be lost.
    """
    if path.stat().st_size > max_bytes:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)
