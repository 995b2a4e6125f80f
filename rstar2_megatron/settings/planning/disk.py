"""Disk that the files of a run need, at most."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.memory import GB, WIDTH
from rstar2_megatron.settings.planning.table import RunPlan
from rstar2_megatron.settings.schema import Settings

# measured on files of the tiny run, and on random text and ids of the paper's vocabulary
_SAMPLE_BYTES = 14  # a token of trajectories.jsonl
_ROLLOUT_BYTES = 14  # a token of rollouts/step_N.jsonl.gz
_ROW_BYTES = 250  # a trajectory of rollouts.jsonl
_TRACE_BYTES = 400  # a turn in traces/step_N.json: generation and tool call
_METRICS_BYTES = 8_000  # a step in metrics.jsonl and the event file


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes by kind."""

    checkpoints: float
    num_checkpoints: int
    export: int
    rollouts: float
    other: float
    """trajectories.jsonl, rollouts.jsonl, traces, metrics; logs are bounded by `runner.max_file_mb` each."""

    @property
    def total(self) -> float:
        return self.checkpoints + self.export + self.rollouts + self.other


def checkpoint_bytes(settings: Settings, model: ModelConfig) -> int:
    """One checkpoint: parameters, fp32 master copy and two moments."""
    return model.num_parameters * (14 if settings.actor.model.precision == "bf16" else 16)


def disk_needed(settings: Settings, model: ModelConfig) -> Disk:
    """Of the whole run, with every trajectory at its full length."""
    runner = settings.runner
    steps = min(runner.max_steps, 100_000)  # a YAML may say "until the epochs are over"
    trajectories = settings.data.rollout_batch_size * settings.algorithm.group_size
    # the newest, the best, and one that is written; only the last where none is saved on the way
    count = 1 if runner.save_interval <= 0 else runner.keep_checkpoints + runner.keep_best + 1
    kept = min(steps, runner.keep_rollouts or steps) if runner.save_rollout_tokens else 0
    limit = runner.max_file_mb * 2**20
    samples = steps * runner.save_trajectories_per_step * runner.seq_length * _SAMPLE_BYTES
    rows = steps * trajectories * _ROW_BYTES if runner.save_rollouts else 0
    traces = len(runner.trace) * trajectories * settings.agentloop.max_assistant_turns * _TRACE_BYTES
    return Disk(
        checkpoints=count * checkpoint_bytes(settings, model),
        num_checkpoints=count,
        export=model.num_parameters * WIDTH[settings.actor.model.precision],
        rollouts=kept * trajectories * runner.seq_length * _ROLLOUT_BYTES,
        other=min(samples, limit) + min(rows, limit) + traces + steps * _METRICS_BYTES,
    )


def plan_disk(plan: RunPlan, settings: Settings, model: ModelConfig) -> None:
    if settings.runner.max_steps == 0:
        return
    disk = disk_needed(settings, model)
    rollouts = f" + rollouts/ {_gb(disk.rollouts)}" if disk.rollouts else ""
    plan.add(
        "disk",
        "GB of the run",
        f"at most {_gb(disk.total)} = {disk.num_checkpoints} checkpoints {_gb(disk.checkpoints)} + export "
        f"{_gb(disk.export)}{rollouts} + samples, metrics and traces {_gb(disk.other)}; a log at most "
        f"{_gb(2 * settings.runner.max_file_mb * 2**20)}",
    )


def _gb(size: float) -> str:
    """Three digits."""
    value = size / GB
    return f"{value:.0f}" if value >= 100 else f"{value:.{max(0, 2 - math.floor(math.log10(max(value, 1e-3))))}f}"
