"""trajectories.jsonl: a few trajectories of each step, whole, for people and for the trajectory page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.algorithm.roc import ResampleResult
from rstar2_megatron.trajectory import Group, Trajectory
from rstar2_megatron.trajectory_row import trajectory_row


class TrajectorySamples:
    """Appends up to `per_step` trajectories a step: the first of each group in turn, so that groups vary."""

    def __init__(self, path: Path, per_step: int) -> None:
        self.path = path
        self.per_step = per_step

    def append(self, step: int, groups: Sequence[Group], resampled: Sequence[ResampleResult]) -> None:
        kept = {id(t) for result in resampled for t in result.kept}
        rows: list[dict[str, Any]] = []
        for group, trajectory in _in_turn(groups):
            if len(rows) == self.per_step:
                break
            row = trajectory_row(group.problem, trajectory)
            rows.append({"step": step, **row, "kept": id(trajectory) in kept})
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def truncate_after(self, step: int) -> None:
        """Drop samples of steps after `step`, which a resumed run does again."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                break  # a kill cut this line short
        partial = self.path.with_suffix(".unfinished")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self.path)


def _in_turn(groups: Sequence[Group]) -> Iterator[tuple[Group, Trajectory]]:
    longest = max((len(g.trajectories) for g in groups), default=0)
    for index in range(longest):
        for group in groups:
            if index < len(group.trajectories):
                yield group, group.trajectories[index]
