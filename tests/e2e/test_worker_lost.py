"""A whole run whose rollout worker process is killed: the other engine goes on, and the worker comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import RunProcess, arguments, read_jsonl
from tests.processes import command_line

LIMIT_S = 420


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_rollout_worker_does_not_end_the_run(cache: Path, first_run: Path, tmp_path: Path) -> None:
    """Actor and engines take turns with their slots, so the new engine starts while the actor sleeps."""
    metrics = tmp_path / "lost" / "metrics.jsonl"
    run = RunProcess(
        arguments(
            cache,
            tmp_path,
            "lost",
            "runner.max_steps=4",
            "evaluation.before_and_after=False",
            "actor.offload_weight=True",
            "actor.offload_grad=True",
            "actor.offload_optimizer=True",
        ),
        tmp_path / "lost.log",
    ).start()
    try:
        run.wait_for(lambda: len(read_jsonl(metrics)) == 1, LIMIT_S, "the first step")
        time.sleep(1.0)
        workers = [p for p in run.processes() if "".join(command_line(p)).startswith("ray::RolloutWorker")]
        assert len(workers) == 2
        os.kill(workers[0].pid, signal.SIGKILL)
        assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    finally:
        run.kill_all()
    rows = read_jsonl(metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    counts = [[row[f"rollout/engine/{name}"] for name in ("workers_lost", "engines_gone", "worker_restarts")] for row in rows]
    assert counts == [[0, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert all(row["rollout/num_trajectories"] == 64 for row in rows)
    assert all(row["rollout/dropped_infrastructure"] == 0 for row in rows)
    assert all(row.get("rollout/logprob_diff_max", 0) < 1e-3 for row in rows)  # the restarted engine has these weights
    assert "runs again in a new worker (restart 1 of 2)" in run.text()
