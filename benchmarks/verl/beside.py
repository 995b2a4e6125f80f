"""Runs of verl and of this project side by side on a CPU, from one model, drawn as one comparison.

    bash examples/agent/rstar2/compare_with_verl.sh NAME [key=value ...] [--arms ARM ...] [--seeds N ...] [--out DIR]

Every run starts from the same model: that of NAME's cold start, or `rollout.model.model_path`. A seed decides the order of the
problems and the sampling. A finished run is not repeated, so after a stop the same command continues.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.logged import logged
from benchmarks.verl.dumps import add_tool_errors
from benchmarks.verl.export import CODE, export
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.report.curves import main as draw
from rstar2_megatron.report.names import panel
from rstar2_megatron.report.read import read_logs
from rstar2_megatron.runs.cold_start import find_cached
from rstar2_megatron.settings.load import CONFIG_DIR, ConfigError, load_settings, users_path
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.tiny.resolve import resolve_tiny

VERL = "verl"
PANELS = (
    "pass-rate",
    "length",
    "length-all",
    "tool-errors",
    "tool-errors-positive",
    "held-out",
    "entropy",
    "grad-norm",
    "time",
)
_ROOT = CONFIG_DIR.parent
_RESAMPLE = "algorithm.down_sampling.do_down_sampling"
_CONFIG = "algorithm.down_sampling.down_sampling_config"
# of RoC: the quotas and draws of the paper, or those of the public code
_ROC = {
    "roc-paper": {"mode": "paper", "min_zero_reward_trace_num": 0, "min_non_zero_reward_trace_num": 0},
    "roc-released": {"mode": "released", "min_zero_reward_trace_num": 2, "min_non_zero_reward_trace_num": 2},
}
ARMS = (VERL, "grpo", *_ROC)
# verl on one CPU process: `cpu_platform` beside its other files, and what needs CUDA off
_ON_A_CPU = {
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.resume_mode": "disable",
    "actor_rollout_ref.rollout.name": "sglang_cpu",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.model.use_remove_padding": False,  # flash attention
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "data.dataloader_num_workers": 0,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "+ray_kwargs.ray_init.num_gpus": 1,  # a logical resource
    "ray_kwargs.ray_init.num_cpus": 12,
    "+ray_kwargs.ray_init.include_dashboard": False,
}


@dataclass(frozen=True)
class Beside:
    """What is compared. `python`: the interpreter that has verl."""

    config: str
    overrides: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    out: Path
    python: Path

    def run(self) -> int:
        """Run what is not finished, and draw. Returns the exit code of the drawing.

        Raises ConfigError for bad input, RuntimeError for a run that failed.
        """
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown:
            raise ConfigError(f"unknown arms {unknown}; known: {', '.join(ARMS)}")
        settings = resolve_tiny(load_settings(self.config, self.overrides))
        self.out.mkdir(parents=True, exist_ok=True)
        start = self.start_model(settings)
        paths: dict[str, list[str]] = {arm: [] for arm in self.arms}
        for seed in self.seeds:  # so that a comparison that is stopped has whole seeds
            for arm in self.arms:
                words = [*start, *seed_words(seed), *arm_words(arm, settings)]
                run = self._run_verl if arm == VERL else self._run_ours
                paths[arm].append(str(run(f"{arm}-{seed}", words, settings.runner.max_steps)))
        arms = [word for arm in self.arms for word in ("--arm", f"{arm}={','.join(paths[arm])}")]
        logs = [log for places in paths.values() for place in places for log in read_logs(place)]
        shown = [word for word in PANELS if any(panel(word).metric in log.series for log in logs)]
        # RoC rejects groups, so that a step does not train on as much in every arm
        return draw([*arms, "--metrics", *shown, "--x", "trajectories", "--out", str(self.out)])

    def start_model(self, settings: Settings) -> list[str]:
        """Overrides that start a run from the model of the cold start, which is made here if it is not cached."""
        words = [f"cold_start.seed={settings.cold_start.seed}"]
        if not settings.cold_start.enabled:
            return words
        if find_cached(settings) is None:
            only = ["runner.max_steps=1", "runner.save_interval=-1", "runner.val_check_interval=-1"]
            self._ours("sft", [*only, *self.place("sft")])
        cached = find_cached(settings)
        if cached is None:
            raise RuntimeError(f"the cold start left no model; see {self.out / 'sft.log'}")
        return [*words, "cold_start.enabled=False", f"rollout.model.model_path={cached.model}"]

    def place(self, name: str) -> list[str]:
        return [f"runner.output_dir={self.out}", f"runner.experiment_name={name}"]

    def _run_ours(self, name: str, words: Sequence[str], steps: int) -> Path:
        directory = self.out / name
        if not (directory / "finished.json").is_file():
            self._ours(name, [*words, *self.place(name)])
        return directory

    def _ours(self, name: str, words: Sequence[str]) -> None:
        command = ["bash", str(_ROOT / "run_rstar2.sh"), self.config, *self.overrides, *words]
        logged(command, self.out / f"{name}.log", dict(os.environ), users_path("."))

    def _run_verl(self, name: str, words: Sequence[str], steps: int) -> Path:
        directory, merged = self.out / name, self.out / name / "metrics.jsonl"
        if merged.is_file():
            return merged
        settings = resolve_tiny(load_settings(self.config, [*self.overrides, *words, f"runner.experiment_name={name}"]))
        # of a run that was stopped; verl would append to its log
        shutil.rmtree(directory, ignore_errors=True)
        dumps = directory / "rollouts"
        keys = {**_ON_A_CPU, "trainer.rollout_data_dir": dumps}
        command = ["bash", str(directory / "run_verl.sh"), *(f"{key}={value}" for key, value in keys.items())]
        judge = JudgeService(settings.tools.codejudge, directory / "judge.log")
        # verl, its Ray and its loggers leave their temporary files
        with tempfile.TemporaryDirectory(prefix="verl-", ignore_cleanup_errors=True) as temporary:
            try:
                judge.begin()
                export(_with_judge(settings, judge.wait_ready()), directory)
                environment = verl_environment(self.python) | {"TMPDIR": temporary}
                logged(command, self.out / f"{name}.log", environment, directory)
            finally:
                judge.stop()
        runner = settings.runner
        log = directory / "logs" / runner.logger.project_name / f"{runner.experiment_name}.jsonl"
        reached = add_tool_errors(log, dumps, merged)
        if reached < steps:
            merged.unlink()
            raise RuntimeError(f"verl ended at step {reached} of {steps}; see {self.out / f'{name}.log'}")
        return merged


def arm_words(arm: str, settings: Settings) -> list[str]:
    """Overrides of an arm. Every arm trains on `down_sample_to_n` trajectories a problem; RoC draws `group_size`."""
    if arm in _ROC:
        values = {_RESAMPLE: True, **{f"{_CONFIG}.{key}": value for key, value in _ROC[arm].items()}}
    else:
        kept = settings.algorithm.down_sampling.down_sampling_config.down_sample_to_n
        values = {_RESAMPLE: False, "algorithm.group_size": kept}
    return [f"{key}={value}" for key, value in values.items()]


def seed_words(seed: int) -> list[str]:
    return [f"actor.seed={seed}", f"data.seed={seed}"]


def _with_judge(settings: Settings, url: str) -> Settings:
    address = urlsplit(url)
    place = {"host_addr": address.hostname, "host_port": address.port}
    judge = settings.tools.codejudge.model_copy(update=place)
    return settings.model_copy(update={"tools": settings.tools.model_copy(update={"codejudge": judge})})


def verl_environment(python: Path) -> dict[str, str]:
    """The environment of verl's processes: its interpreter first, the CPU platform, and no Ray of somebody else."""
    own = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return own | {
        "PATH": f"{python.parent}:{own.get('PATH', os.defpath)}",
        "PYTHONPATH": str(CODE),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine that verl has for CUDA, on the CPU
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        # Its one actor process and its one engine take turns, so each may have every core.
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",  # it would end this run for another program's memory
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
    }
