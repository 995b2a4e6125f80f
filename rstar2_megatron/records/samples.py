"""Rows of trajectories.jsonl: a few complete groups of each step, for people and for the trajectory page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rstar2_megatron.algorithm.roc import ResampleResult
from rstar2_megatron.records.trajectory_row import FLOATS, INTS, pack, trajectory_row
from rstar2_megatron.trajectory import Group, Trajectory


@dataclass
class ShownGroup:
    """One group that is written completely, with its resampling result."""

    group: Group
    result: ResampleResult
    actor_logprobs: list[np.ndarray] | None = None
    """The actor's log-prob of each response token of each of `trajectories`, before the update. None: nothing was trained."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """Trajectories in the order of `result.indices`."""
        return self.group.usable


def choose_shown(groups: Sequence[Group], resampled: Sequence[ResampleResult], at_least: int) -> list[ShownGroup]:
    """Complete groups with `at_least` trajectories in all, in the order of the step.

    Groups that are trained on are chosen before rejected ones.
    """
    chosen: list[int] = []
    count = 0
    for number in sorted(range(len(groups)), key=lambda number: resampled[number].rejected):
        if count >= at_least:
            break
        chosen.append(number)
        count += len(groups[number].usable)
    return [ShownGroup(groups[number], resampled[number]) for number in sorted(chosen)]


def group_rows(step: int, shown: ShownGroup) -> list[dict[str, Any]]:
    """One row for each trajectory of a group: `trajectory_row`, whether it was kept, and its penalties.

    `generated` lists (start, end) spans of the response. `logprob_diff` is the log-prob of the actor minus that of the
    engine for each token of these spans. `token_ids` are the ids of the response. Both lists are packed.
    """
    result = shown.result
    kept = set(result.indices)
    rows = []
    for index, trajectory in enumerate(shown.trajectories):
        row = {"step": step, **trajectory_row(shown.group.problem, trajectory), "kept": index in kept}
        row["rejected"] = result.reason.value or None
        if result.penalties:
            penalty = result.penalties[index]
            row["penalty"] = {"error": penalty.error, "format": penalty.answer_format, "answers": penalty.num_answers}
        row["generated"] = trajectory.spans
        row["token_ids"] = pack(trajectory.response_ids, INTS)
        if shown.actor_logprobs is not None:
            ours, theirs = shown.actor_logprobs[index], trajectory.rollout_logprobs
            row["logprob_diff"] = pack((ours - theirs)[trajectory.loss_mask.astype(bool)], FLOATS)
        rows.append(row)
    return rows
