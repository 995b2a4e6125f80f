"""Phases that do not wait for their last trajectories, in whole runs with every part real."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rstar2_megatron.records.trajectory_files import read_groups, rollouts_path
from rstar2_megatron.rollout.phase import OpenGroup
from rstar2_megatron.trajectory import FinishReason, Group
from tests.e2e.runs import ONE_SLOT, RunProcess, arguments, read_jsonl

LIMIT_S = 600
pytestmark = [pytest.mark.timeout(1200), pytest.mark.ci]


def test_carried_over_a_resume_then_cut(cache: Path, first_run: Path, tmp_path: Path) -> None:
    """rollout.tail=carry: trajectories that two steps leave unfinished continue token for token, in the next step and, from a
    checkpoint, in another process. There tail=cut may end the third step early: when every group has answers of both
    kinds, which this barely taught model gives in some runs (tests/rollout/test_phase.py has the rule itself).
    """

    def run(steps: int, tail: str) -> list[dict]:
        command = arguments(
            cache,
            tmp_path,
            "tails",
            *ONE_SLOT,
            f"rollout.tail={tail}",
            "rollout.max_running_requests=8",  # groups end one after the other
            "rollout.carry_share=0.75",
            "rollout.max_carry_age=2",
            "rollout.cut_share=1.0",
            f"runner.max_steps={steps}",
            "runner.keep_checkpoints=3",
            "runner.save_rollout_tokens=True",
            "evaluation.before_and_after=False",
        )
        one = RunProcess(command, tmp_path / f"{tail}.log").start()
        one.wait_for(lambda: copy_state(steps - 1), LIMIT_S, f"the checkpoint of step {steps - 1}")
        assert one.wait(LIMIT_S) == 0, one.text()[-6000:]
        assert copy_state(steps)
        one.assert_nothing_left()
        rows = read_jsonl(tmp_path / "tails" / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        return rows

    def rolled_out(step: int) -> dict[str, Group]:
        groups = read_groups(rollouts_path(tmp_path / "tails" / "rollouts", step))
        return {group.problem.query_id: group for group in groups}

    def copy_state(step: int) -> bool:
        """The checkpoint of a step that updated nothing goes when the next one is there."""
        state = tmp_path / "tails" / "checkpoints" / f"global_step_{step}" / "data" / "data.pt"
        if state.exists():
            shutil.copyfile(state, tmp_path / f"global_step_{step}.pt")
        return state.exists()

    def left_by(step: int) -> dict[str, OpenGroup]:
        data = tmp_path / f"global_step_{step}.pt"
        return {g.problem.query_id: g for g in torch.load(data, weights_only=False)["carried"]}

    first, second = run(2, "carry")
    third = run(3, "cut")[-1]
    left = {1: left_by(1), 2: left_by(2), 3: left_by(3)}
    assert not left[3] and len(left[1]) == first["rollout/engine/carried_groups"]
    for step, row in ((1, first), (2, second)):
        assert row["rollout/engine/carried_groups"] >= 1 and not row["rollout/dropped_infrastructure"]
        assert not left[step].keys() & rolled_out(step).keys()
    assert left[1].keys() <= rolled_out(2).keys() | left[2].keys() and left[2].keys() <= rolled_out(3).keys()
    parked = [
        (step, t) for step in (1, 2) for group in left[step].values() for t in group.parked.values() if len(t.response_ids)
    ]
    assert {step for step, _ in parked} == {1, 2}
    finished = {
        (t.query_id, t.rollout_index): t
        for step in (2, 3)
        for group in rolled_out(step).values()
        for t in group.trajectories
        if t.usable
    }
    went_on = 0
    for step, half in parked:
        assert {span.version for span in half.version_spans} <= set(range(step))
        if (whole := finished.get((half.query_id, half.rollout_index))) is None:
            continue  # cut
        count = len(half.response_ids)
        assert whole.response_ids[:count].tolist() == half.response_ids.tolist()
        assert whole.rollout_logprobs[:count].tolist() == half.rollout_logprobs.tolist()
        went_on += len({span.version for span in whole.version_spans}) >= 2
    assert went_on and max(row["rollout/engine/max_of_trajectory_age"] for row in (second, third)) >= 1

    trajectories = [t for group in rolled_out(3).values() for t in group.trajectories]
    cut = sum(t.finish_reason is FinishReason.CUT for t in trajectories)
    assert cut == third["rollout/dropped_cut"] == third["rollout/engine/cut_trajectories"]
    assert len(trajectories) == 16 * len(rolled_out(3)) == third["rollout/num_trajectories"]
    for group in rolled_out(3).values():  # nothing was cut that resample-on-correct needs
        rewards = [t.reward for t in group.usable]
        assert len(rewards) == 16 or (len(rewards) >= 8 and len(set(rewards)) == 2)
