"""What whole runs share: the supervised start of the tiny model, done once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.services.process import free_port
from tests.e2e.runs import RunProcess, arguments


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the supervised start, empty until `first_run` has made it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def cache(new_cache: Path, first_run: Path) -> Path:
    """The supervised start that `first_run` made, with its evaluations."""
    return new_cache


@pytest.fixture(scope="session")
def first_run(new_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of two steps, the supervised start and its evaluations included; returns its directory."""
    results = tmp_path_factory.mktemp("results")
    run = RunProcess(
        arguments(
            new_cache,
            results,
            "first",
            "runner.save_rollout_tokens=True",
            "runner.trace=2",
            "runner.profiler.steps=2",
            "runner.profiler.engine_forwards=8",
            f"runner.metrics_port={free_port('127.0.0.1')}",
        ),
        results / "first.log",
    ).start()
    code = run.wait(1500)
    assert code == 0, run.text()[-6000:]
    run.assert_nothing_left()
    return results / "first"
