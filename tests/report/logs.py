"""Runs as the project logs them, and a path that holds one run, read."""

from __future__ import annotations

from pathlib import Path

from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.report.log_formats import Log
from rstar2_megatron.report.names import LENGTH, REWARD
from rstar2_megatron.report.read import read_logs


def write_run(directory: Path, rewards: list[float], first_step: int = 1) -> Path:
    file = JsonlFile(directory / "metrics.jsonl")
    for step, reward in enumerate(rewards, first_step):
        file.append(
            {
                "step": step,
                "rollout/pass_rate": reward / 2,
                REWARD: reward,
                LENGTH: 100.0 + step,
                "rollout/tool_error_ratio_positive": 1 / step if step else 1.0,
                "time/step": 2.0,
            }
        )
    return directory


def read_log(path: str | Path, *, verl: bool = False) -> Log:
    (log,) = read_logs(path, verl=verl)
    return log
