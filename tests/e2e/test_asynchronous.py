"""Training while the engines go on, in whole runs with every part real."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from rstar2_megatron.data.loader import ProblemLoader
from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.records.trace import read_trace, trace_path
from rstar2_megatron.records.trajectory_files import read_groups, rollouts_path
from rstar2_megatron.report.step_bound import row_names
from rstar2_megatron.settings.load import load_settings
from tests.e2e.runs import RunProcess, arguments, read_jsonl

LIMIT_S = 600
pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]
BATCH, SIZE, BOUND, STEPS = 2, 8, 2, 5


def test_killed_in_mid_run_and_resumed_no_problem_is_lost_or_trained_twice(
    cache: Path, tmp_path: Path
) -> None:
    """SIGKILL some steps after a checkpoint. Every problem that the loader gave is in exactly one step, whole, however long
    its trajectories are; what the checkpoint holds of them continues token for token.
    """
    command = arguments(
        cache,
        tmp_path,
        "apart",
        f"algorithm.max_staleness={BOUND}",
        "cluster.component_placement={actor: 0, rollout: 1, reward: 0}",
        "actor.model.tensor_model_parallel_size=1",
        f"algorithm.group_size={SIZE}",
        "algorithm.down_sampling.down_sampling_config.down_sample_to_n=4",
        "algorithm.down_sampling.down_sampling_config.min_zero_reward_trace_num=1",
        "algorithm.down_sampling.down_sampling_config.min_non_zero_reward_trace_num=1",
        f"data.rollout_batch_size={BATCH}",
        f"runner.max_steps={STEPS}",
        "runner.save_interval=2",
        "runner.save_rollout_tokens=True",
        "runner.trace=4",
        "runner.val_check_interval=2",
        "evaluation.before_and_after=False",
        "evaluation.num_problems=4",
        "evaluation.num_samples=1",
    )
    directory = tmp_path / "apart"
    metrics, first = directory / "metrics.jsonl", directory / "checkpoints" / "global_step_2"
    run = RunProcess(command, tmp_path / "killed.log").start()
    run.wait_for(lambda: len(read_jsonl(metrics)) >= 3 and first.is_dir(), LIMIT_S, "three steps")
    run.send(signal.SIGKILL)
    run.assert_nothing_left(30, killed=True)
    state = torch.load(first / "data" / "data.pt", weights_only=False)["unfinished"]
    assert state.open or state.complete

    again = RunProcess(command, tmp_path / "resumed.log", temporary=run.temporary).start()
    assert again.wait(LIMIT_S) == 0, again.text()[-6000:]
    again.assert_nothing_left()
    assert f"resuming from {first}" in again.text()

    rows = read_jsonl(metrics)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["rollout/groups_kept"] == BATCH and not row["rollout/dropped_infrastructure"]
        assert row["rollout/engine/staleness_max"] <= BOUND and not row["rollout/engine/dropped_stale"]
        shares = [row[f"rollout/engine/staleness_share/{n}"] for n in range(BOUND + 1)]
        assert sum(shares) == pytest.approx(1)
        assert row["rollout/engine/trainer_idle_seconds"] == row["time/rollout"]
        assert 0 <= row["rollout/engine/engine_idle_seconds"] <= row["time/step"]
    assert max(row["rollout/engine/staleness_max"] for row in rows) >= 1
    assert all(rows[n]["eval/samples"] == 4 for n in (1, 3))

    assert {"engine 0", "actor rank 0"} <= set(row_names(read_trace(trace_path(directory, 4))).values())

    steps = {step: read_groups(rollouts_path(directory / "rollouts", step)) for step in range(1, STEPS + 1)}
    trained = [group.problem.query_id for groups in steps.values() for group in groups]
    assert len(trained) == len(set(trained))
    settings = load_settings(str(directory / "config.yaml"))
    problems = read_problems(
        settings.data.train_data_paths, settings.data.prompt_key, settings.data.answer_key
    )
    given = ProblemLoader(problems, settings.data).take(len(trained))
    assert set(trained) == {problem.query_id for problem in given}
    every = [(step, t) for step, groups in steps.items() for g in groups for t in g.trajectories]
    assert len(every) == SIZE * len(trained) and all(t.usable for _, t in every)
    assert all(span.version < step for step, t in every for span in t.version_spans)
    assert any(len({span.version for span in t.version_spans}) > 1 for _, t in every)

    finished = {(t.query_id, t.rollout_index): t for _, t in every}
    begun = [t for g in state.open for t in (*g.parked.values(), *g.ended.values())]
    for t in [*begun, *(t for g in (*state.complete, *state.rejected) for t in g.trajectories)]:
        count = len(t.response_ids)
        assert finished[t.query_id, t.rollout_index].response_ids[:count].tolist() == t.response_ids.tolist()
