"""A whole run that loses an engine, a rollout worker and the judge, one step after the other: it ends with nothing lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from rstar2_megatron.services.process import free_port, terminate_tree
from tests.e2e.runs import ROOT, RunProcess, arguments, read_jsonl
from tests.processes import command_line

LIMIT_S = 600
AWAY_S = 10.0  # longer than a call's first tries


class NamedJudge:
    """A judge that the YAML names, which can be killed and started again on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["-m", "rstar2_megatron.judge", "all", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "2"]
        self._process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ping", timeout=2):
                return
            time.sleep(0.2)
        raise AssertionError("the judge did not start")

    def calls(self) -> float:
        """Number of calls it has answered."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("judge_calls_total{"))

    def kill(self) -> None:
        assert self._process is not None
        terminate_tree(self._process.pid, grace_s=0.0, first_signal=signal.SIGKILL)
        self._process.wait()


@pytest.mark.ci
@pytest.mark.timeout(1200)
def test_engine_worker_and_judge_die_and_nothing_is_lost(cache: Path, tmp_path: Path) -> None:
    """Actor and engines take turns with their slots, so the new engine of the lost worker starts while the actor sleeps."""
    judge = NamedJudge()
    metrics = tmp_path / "faults" / "metrics.jsonl"
    run = RunProcess(
        arguments(
            cache,
            tmp_path,
            "faults",
            "tools.codejudge.host_addr=127.0.0.1",
            f"tools.codejudge.host_port={judge.port}",
            "runner.max_steps=4",
            "evaluation.before_and_after=False",
            "actor.offload_weight=True",
            "actor.offload_grad=True",
            "actor.offload_optimizer=True",
        ),
        tmp_path / "faults.log",
    )

    def into_step(number: int) -> None:
        run.wait_for(lambda: len(read_jsonl(metrics)) >= number - 1, LIMIT_S, f"step {number}")
        calls = judge.calls()
        run.wait_for(lambda: judge.calls() > calls, LIMIT_S, f"a tool call of step {number}")

    def processes(words: str) -> list[psutil.Process]:
        return [p for p in run.processes() if words in " ".join(command_line(p))]

    judge.start()
    try:
        run.start()
        into_step(2)
        os.kill(processes("scheduler")[0].pid, signal.SIGKILL)
        into_step(3)
        workers = [p for p in processes("ray::RolloutWorker") if command_line(p)[0].startswith("ray::")]
        assert len(workers) == 2
        os.kill(workers[0].pid, signal.SIGKILL)
        into_step(4)
        judge.kill()
        time.sleep(AWAY_S)
        judge.start()
        assert run.wait(LIMIT_S) == 0, run.text()[-6000:]
    finally:
        judge.kill()
        run.kill_all()
    rows = read_jsonl(metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["rollout/engine/engine_restarts"] for row in rows) >= 1
    counts = [[row[f"rollout/engine/{name}"] for name in ("workers_lost", "engines_gone", "worker_restarts")] for row in rows]
    assert counts == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert all(row["rollout/num_trajectories"] == 64 for row in rows)
    assert all(row["rollout/dropped_infrastructure"] == 0 for row in rows)
    assert all(row.get("rollout/logprob_diff_max", 0) < 1e-3 for row in rows)  # the new engines have these weights
    assert "runs again in a new worker (restart 1 of 2)" in run.text()
    outcomes = [call["outcome"] for row in read_jsonl(tmp_path / "faults" / "trajectories.jsonl") for call in row["tool_calls"]]
    assert "infrastructure" not in outcomes and "ok" in outcomes
