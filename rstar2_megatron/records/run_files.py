"""The files that a reinforcement-learning run extends at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.rollout_log import rollout_rows
from rstar2_megatron.records.samples import ShownGroup, group_rows
from rstar2_megatron.records.trajectory_files import rollouts_path, write_groups
from rstar2_megatron.trajectory import Group


class RunFiles:
    """metrics.jsonl, trajectories.jsonl and, when asked for, rollouts.jsonl and rollouts/ of a run's directory."""

    def __init__(
        self, directory: Path, *, save_rollouts: bool = False, save_rollout_tokens: bool = False
    ) -> None:
        """save_rollouts, save_rollout_tokens: as the keys of `runner` of the same names."""
        self.metrics = JsonlFile(directory / "metrics.jsonl")
        self._trajectories = JsonlFile(directory / "trajectories.jsonl")
        self._rollouts = JsonlFile(directory / "rollouts.jsonl")
        self._tokens = directory / "rollouts"
        self._save_rollouts, self._save_rollout_tokens = save_rollouts, save_rollout_tokens

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after `step`, that of the checkpoint: a resumed run repeats these steps."""
        for file in (self.metrics, self._trajectories, self._rollouts):
            file.truncate_after(step)

    def append(
        self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group], shown: Sequence[ShownGroup]
    ) -> None:
        """Write one step; `metrics` become its row of metrics.jsonl."""
        self.metrics.append({**metrics, "step": step})
        self._trajectories.append(*(row for group in shown for row in group_rows(step, group)))
        if self._save_rollouts:
            self._rollouts.append(*rollout_rows(step, groups))
        if self._save_rollout_tokens:
            write_groups(rollouts_path(self._tokens, step), groups)
