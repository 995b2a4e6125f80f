"""TensorBoard, wandb and swanlab, the real packages offline, through RLinf's logger with our settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rstar2_megatron.runs.preflight import logger_problems
from rstar2_megatron.settings.load import load_settings
from tests.e2e.runs import ROOT
from tests.report.logs import read_log

PROGRAM = """
import sys
from rlinf.utils.metric_logger import MetricLogger
from rstar2_megatron.settings.load import load_settings, to_dict_config

settings = load_settings("rstar2-tiny-cpu", sys.argv[1:])
log = MetricLogger(to_dict_config(settings))
for step in (1, 2, 3):
    log.log({"rollout/reward_scores": step / 10, "eval/pass@4": 0.5, "train/actor/lr": 1e-6}, step)
log.finish()
"""
EXPECTED = {"rollout/reward_scores": {1: 0.1, 2: 0.2, 3: 0.3}, "train/actor/lr": dict.fromkeys((1, 2, 3), 1e-06)}


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_every_backend_holds_every_step_offline(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    words = [
        f"runner.logger.log_path={tmp_path / 'run'}",
        "runner.logger.logger_backends=[tensorboard,wandb,swanlab]",
        "runner.logger.swanlab_mode=offline",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for backend in ("tensorboard", "wandb"):
        log = read_log(tmp_path / "run" / backend)
        assert not log.messages, log.messages
        for name, values in EXPECTED.items():
            assert log.series[name] == pytest.approx(values), (backend, name)
    (backup,) = (tmp_path / "run" / "swanlab").rglob("backup.swanlab")
    stored = backup.read_bytes()
    assert stored.count(b"rollout/reward_scores") >= 3  # a row a step


def test_a_backend_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings("rstar2-tiny-cpu", ["runner.logger.logger_backends=[tensorboard,swanlab]"])
    assert list(logger_problems(settings)) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "swanlab" else object())
    (problem,) = logger_problems(settings)
    assert "swanlab" in problem and "requirements/loggers.txt" in problem
