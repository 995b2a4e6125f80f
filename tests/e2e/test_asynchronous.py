"""Training while the engines go on, in whole runs with every part real."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rstar2_megatron.data.loader import ProblemLoader
from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.records.trace import read_trace, trace_path
from rstar2_megatron.records.trajectory_files import read_groups, rollouts_path
from rstar2_megatron.report.step_bound import timeline
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.trajectory import Trajectory
from tests.e2e.runs import RunProcess, arguments, read_jsonl
from tests.processes import command_line
from tests.small_disk import small_disk

LIMIT_S = 600
pytestmark = [pytest.mark.timeout(2700), pytest.mark.ci]
BATCH, SIZE, BOUND, STEPS = 2, 8, 2, 6
ONE_CHECKPOINT_MB = 34  # room for one checkpoint of 21 MB, not for two


def apart(cache: Path, results: Path, steps: int) -> list[str]:
    """Arguments of a run `apart` with actor and engine on slots of their own, which saves every second step."""
    return arguments(
        cache,
        results,
        "apart",
        f"algorithm.max_staleness={BOUND}",
        "cluster.component_placement={actor: 0, rollout: 1, reward: 0}",
        "actor.model.tensor_model_parallel_size=1",
        f"algorithm.group_size={SIZE}",
        "algorithm.down_sampling.down_sampling_config.down_sample_to_n=4",
        "algorithm.down_sampling.down_sampling_config.min_zero_reward_trace_num=1",
        "algorithm.down_sampling.down_sampling_config.min_non_zero_reward_trace_num=1",
        f"data.rollout_batch_size={BATCH}",
        f"runner.max_steps={steps}",
        "runner.save_interval=2",
        "runner.save_rollout_tokens=True",
        # with its own, the tiny model now and then forgets all within three steps of two groups, which ends a resumed run
        "actor.optim.lr=1.0e-6",
        "actor.optim.min_lr=0.0",
        "evaluation.before_and_after=False",
        "evaluation.num_problems=4",
        "evaluation.num_samples=1",
    )


def assert_within_the_bound(rows: Sequence[dict[str, Any]], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["rollout/groups_kept"] == BATCH and not row["rollout/dropped_infrastructure"]
        assert row["rollout/engine/staleness_max"] <= BOUND and not row["rollout/engine/dropped_stale"]


def trained_once(directory: Path, steps: int) -> list[tuple[int, Trajectory]]:
    """(step, trajectory) of all that was trained on: every problem that the loader gave, once and whole."""
    groups = [
        (step, group) for step in range(1, steps + 1) for group in read_groups(rollouts_path(directory / "rollouts", step))
    ]
    trained = [group.problem.query_id for _, group in groups]
    assert len(trained) == len(set(trained))
    settings = load_settings(str(directory / "config.yaml"))
    problems = read_problems(settings.data.train_data_paths, settings.data)
    given = ProblemLoader(problems, settings.data).take(len(trained))
    assert set(trained) == {problem.query_id for problem in given}
    every = [(step, t) for step, group in groups for t in group.trajectories]
    assert len(every) == SIZE * len(trained) and all(t.usable for _, t in every)
    assert all(span.version < step for step, t in every for span in t.version_spans)
    return every


def test_full_disk_dead_judge_and_a_kill_cost_no_problem(cache: Path, tmp_path: Path) -> None:
    """The disk is full at the second checkpoint, which ends the run. With more space it goes on; the judge is killed and
    started again, which costs no trajectory; then SIGKILL, some steps after a checkpoint. The third start ends well: every
    problem that the loader gave is in exactly one step, whole, however long its trajectories are, and what the checkpoint
    holds of them continues token for token.
    """
    directory = tmp_path / "apart"
    metrics, checkpoints = directory / "metrics.jsonl", directory / "checkpoints"
    command = [*apart(cache, tmp_path, STEPS), "runner.trace=6", "runner.val_check_interval=2"]
    with small_disk(checkpoints, ONE_CHECKPOINT_MB):
        full = RunProcess(command, tmp_path / "full.log").start()
        assert full.wait(LIMIT_S) == 1, full.text()[-6000:]
        full.assert_nothing_left(30)
        told = rf"\nerror: could not write {checkpoints}/\S+: .*MB are free there\)\. .* set runner\.output_dir .*"
        assert re.search(told, full.text()) and "Traceback" not in full.text(), full.text()[-6000:]
        assert [path.name for path in checkpoints.glob("global_step_?")] == ["global_step_2"]

        subprocess.run(["mount", "-o", "remount,size=1g", str(checkpoints)], check=True)
        killed = RunProcess(command, tmp_path / "killed.log").start()
        killed.wait_for(lambda: "resuming from" in killed.text(), LIMIT_S, "the resume")
        killed.wait_for(lambda: len(read_jsonl(metrics)) >= 3, LIMIT_S, "step 3 again")
        (judge,) = [p for p in killed.processes() if "rstar2_megatron.judge all" in " ".join(command_line(p))]
        judge.kill()
        killed.wait_for(lambda: "the Code Judge ended with code -9 and runs again" in killed.text(), LIMIT_S, "another judge")
        fourth = checkpoints / "global_step_4"
        killed.wait_for(lambda: len(read_jsonl(metrics)) >= 5 and fourth.is_dir(), LIMIT_S, "the fifth step")
        killed.send(signal.SIGKILL)
        killed.assert_nothing_left(30, killed=True)
        state = torch.load(fourth / "data" / "data.pt", weights_only=False)["unfinished"]
        assert state.open or state.complete

        last = RunProcess(command, tmp_path / "last.log", temporary=killed.temporary).start()
        assert last.wait(LIMIT_S) == 0, last.text()[-6000:]
        last.assert_nothing_left()
        assert f"resuming from {fourth}" in last.text()

    rows = read_jsonl(metrics)
    assert_within_the_bound(rows, STEPS)
    for row in rows:
        shares = [row[f"rollout/engine/staleness_share/{n}"] for n in range(BOUND + 1)]
        assert sum(shares) == pytest.approx(1)
        assert row["rollout/engine/trainer_idle_seconds"] == row["time/rollout"]
        assert 0 <= row["rollout/engine/engine_idle_seconds"] <= row["time/step"]
    assert max(row["rollout/engine/staleness_max"] for row in rows) >= 1
    assert all(rows[n]["eval/samples"] == 4 for n in (1, 3, 5))

    assert {"engine 0", "actor rank 0"} <= set(timeline(read_trace(trace_path(directory, 6))).rows.values())

    every = trained_once(directory, STEPS)
    assert any(len({span.version for span in t.version_spans}) > 1 for _, t in every)
    finished = {(t.query_id, t.rollout_index): t for _, t in every}
    begun = [t for g in state.open for t in (*g.parked.values(), *g.ended.values())]
    for t in [*begun, *(t for g in (*state.complete, *state.rejected) for t in g.trajectories)]:
        count = len(t.response_ids)
        assert finished[t.query_id, t.rollout_index].response_ids[:count].tolist() == t.response_ids.tolist()


@pytest.mark.release
def test_what_was_rolled_out_beside_training_trains_the_same_in_turns(cache: Path, tmp_path: Path) -> None:
    """Three steps, replayed with `algorithm.max_staleness=0`: what the actor computes is bit for bit the same."""
    first = RunProcess(apart(cache, tmp_path, 3), tmp_path / "first.log").start()
    assert first.wait(LIMIT_S) == 0, first.text()[-6000:]
    beside = read_jsonl(tmp_path / "apart" / "metrics.jsonl")
    assert max(row["rollout/engine/staleness_max"] for row in beside) >= 1
    replayed = f"runner.replay_rollouts={tmp_path}/apart/rollouts"
    command = [*apart(cache, tmp_path, 3), "algorithm.max_staleness=0", replayed, "runner.experiment_name=turns"]
    again = RunProcess(command, tmp_path / "again.log").start()
    assert again.wait(LIMIT_S) == 0, again.text()[-6000:]
    again.assert_nothing_left()
    in_turns = read_jsonl(tmp_path / "turns" / "metrics.jsonl")
    assert all("train/actor/grad_norm" in row for row in beside)
    assert [computed(row) for row in in_turns] == [computed(row) for row in beside]


def computed(row: dict[str, Any]) -> dict[str, Any]:
    """What the actor computed in a step, without its speed."""
    return {name: value for name, value in row.items() if name.startswith("train/") and not re.search("second|tflops", name)}
