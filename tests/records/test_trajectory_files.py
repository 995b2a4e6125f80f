"""Saved rollouts come back token for token, and a damaged file says where."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from rstar2_megatron.records.trajectory_files import read_groups, rollouts_path, write_groups
from rstar2_megatron.trajectory import FinishReason, Group, Problem, ToolCall, ToolOutcome, Trajectory, VersionSpan


def group(name: str) -> Group:
    trajectory = Trajectory(
        query_id=name,
        rollout_index=1,
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        loss_mask=[1, 0],
        rollout_logprobs=[-0.12345678955316544, 0.0],
        version_spans=[VersionSpan(0, 1, 3)],
        assistant_texts=["½"],
        tool_calls=[ToolCall("python", {"code": "1"}, ToolOutcome.TIMEOUT, "late", 0.25)],
        finish_reason=FinishReason.TURN_LIMIT,
        reward=1.0,
        seconds=1.5,
    )
    return Group(Problem(name, [{"role": "user", "content": "?"}], ["1"], extra={"level": 3}), [trajectory])


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = rollouts_path(tmp_path, 12)
    groups = [group("a"), group("b")]
    write_groups(path, groups)
    assert path.name == "step_000012.jsonl.gz" and [p.name for p in tmp_path.iterdir()] == [path.name]
    assert read_groups(path) == groups


@pytest.mark.parametrize("reason", [FinishReason.CUT, FinishReason.INFRASTRUCTURE])
def test_what_ended_before_it_began_has_no_prompt(tmp_path: Path, reason: FinishReason) -> None:
    path = rollouts_path(tmp_path, 1)
    one = group("a")
    one.trajectories.append(Trajectory("a", 2, [], finish_reason=reason))
    write_groups(path, [one])
    assert read_groups(path) == [one]
    one.trajectories[1].finish_reason = FinishReason.TURN_LIMIT
    write_groups(path, [one])
    with pytest.raises(ValueError, match=r"line 1: trajectory a#2: empty prompt"):
        read_groups(path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = rollouts_path(tmp_path, 1)
    broken = group("b")
    broken.trajectories[0].loss_mask = np.array([1, 0, 1], np.uint8)
    write_groups(path, [group("a"), broken])
    with pytest.raises(ValueError, match=r"step_000001\.jsonl\.gz, line 2: .*loss_mask 3"):
        read_groups(path)
    with gzip.open(path, "wb") as file:
        file.write(b'{"problem": {"query_id": 1}}\n')
    with pytest.raises(ValueError, match=r"line 1: problem\.query_id"):
        read_groups(path)
    write_groups(path, [group("a")] * 50)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"step_000001\.jsonl\.gz, line \d+"):
        read_groups(path)
