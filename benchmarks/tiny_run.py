"""The tiny run on a CPU with small steps, as a child process that is watched from outside after each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

_START_S = 1200.0
SMALL = (
    "cold_start.phases=[{name: copy, data_path: 'tiny:copy', steps: 20, batch_size: 64, lr: 3.0e-3, shuffle: False}]",
    "data.rollout_batch_size=4",
    "algorithm.group_size=4",
    "algorithm.down_sampling.do_down_sampling=False",
    "algorithm.sampling_params.max_new_tokens=32",
    "evaluation.before_and_after=False",
    "runner.max_empty_steps=0",
    "runner.save_interval=10",
)


class TinyRun:
    """A run of the checkout `tree` below `place`, with `temporary` as its TMPDIR. Close it."""

    def __init__(self, tree: Path, place: Path, temporary: Path, overrides: Sequence[str]) -> None:
        self.directory = place / "results" / "run"
        self.exit_code: int | None = None
        self._metrics = self.directory / "metrics.jsonl"
        self._output = place / "output"
        own = tree / ".venv" / "bin" / "python"
        command = [str(own) if own.exists() else sys.executable, "-m", "rstar2_megatron.runs.main"]
        command += ["rstar2-tiny-cpu", *SMALL, f"runner.output_dir={place}/results", *overrides]
        command += ["runner.experiment_name=run", f"cold_start.cache_dir={place}/cache"]
        environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=tree)
        self.process = psutil.Process(self._process.pid)

    def finished_steps(self, limit_s: float) -> Iterator[int]:
        """The number of finished steps, each time that it has grown. SIGTERM ends the run `limit_s` after its start."""
        started, seen = time.monotonic(), 0
        while self._process.poll() is None:
            written = self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0
            if written > seen:
                seen = written
                yield seen
            if time.monotonic() - started > (limit_s if seen else min(limit_s, _START_S)):
                self._process.terminate()  # the run ends what it started
                self._process.wait(90)
            time.sleep(0.05)
        self.exit_code = self._process.wait()

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU seconds of all processes of the run so far, ended ones included."""
        seconds = 0.0
        for process in self.processes():
            try:
                seconds += sum(process.cpu_times()[:4])
            except psutil.Error:  # it has ended: its parent counts it
                continue
        return seconds

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._metrics.read_text(encoding="utf-8").splitlines()]

    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def output(self) -> str:
        """The end of what the run printed."""
        return self.text()[-2000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
