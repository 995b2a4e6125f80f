"""Bad input to `run_rstar2.sh` itself: a clear error, a non-zero exit, nothing left running.

`tests/runs/test_preflight.py` and `tests/runs/inputs/test_bad_files.py` have the mistakes one by one, without a process each.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import RunProcess
from tests.small_disk import small_disk

LIMIT_S = 180  # seen: 4 s, for a named judge that keeps silent 11 s; more where the program is read from the disk first


def fails(tmp_path: Path, *arguments: str) -> str:
    run = RunProcess(
        [*arguments, f"runner.output_dir={tmp_path}/results"] if "--help" not in arguments else list(arguments),
        tmp_path / "out.log",
    ).start()
    code = run.wait(LIMIT_S)
    text = run.text()
    assert code not in (0, None), text
    assert "Traceback" not in text, text
    run.assert_nothing_left()
    return text.split("error:", 1)[1]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_help_and_print_config(tmp_path: Path) -> None:
    run = RunProcess(["--help"], tmp_path / "help.log").start()
    assert run.wait(LIMIT_S) == 0
    assert "--dry-run" in run.text() and len(run.text().splitlines()) < 50
    run = RunProcess(["--print-config", "runner.max_steps=7"], tmp_path / "config.log").start()
    assert run.wait(LIMIT_S) == 0
    assert "max_steps: 7" in run.text()


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    run = RunProcess(["--dry-run", f"runner.output_dir={tmp_path}/results"], tmp_path / "plan.log").start()
    assert run.wait(LIMIT_S) == 0
    assert "16 problems x 16 rollouts" in run.text() and "KV" in run.text()
    assert not (tmp_path / "results").exists()


def test_unknown_config_names_the_nearest(tmp_path: Path) -> None:
    error = fails(tmp_path, "rstar2-tiny-gpu")
    assert "rstar2-tiny-gpu" in error and "rstar2-tiny-cpu" in error


@pytest.mark.ci
def test_taken_judge_port(tmp_path: Path) -> None:
    with taken_port() as port:
        assert str(port) in fails(tmp_path, f"tools.codejudge.host_port={port}")


@pytest.mark.ci
def test_taken_metrics_port(tmp_path: Path) -> None:
    with taken_port() as port:
        assert f"runner.metrics_port={port} on 127.0.0.1" in fails(tmp_path, f"runner.metrics_port={port}")
    assert "starting" not in (tmp_path / "out.log").read_text()


@pytest.mark.ci
def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    kept = tmp_path / "global_step_5"
    (kept / "actor").mkdir(parents=True)
    (kept / "data").mkdir()
    (kept / "data" / "data.pt").write_bytes(b"cut")
    assert f"{kept}/data/data.pt cannot be read" in fails(tmp_path, f"runner.resume_dir={kept}")
    assert "starting" not in (tmp_path / "out.log").read_text()


@pytest.mark.ci
def test_named_redis_that_is_not_there(tmp_path: Path) -> None:
    error = fails(tmp_path, "tools.codejudge.redis_uri=redis://127.0.0.1:1/0")
    assert "redis://127.0.0.1:1" in error


@pytest.mark.ci
def test_named_judge_that_is_not_there(tmp_path: Path) -> None:
    error = fails(tmp_path, "tools.codejudge.host_addr=127.0.0.1", "tools.codejudge.host_port=1")
    assert "127.0.0.1:1" in error


@pytest.mark.ci
def test_too_little_disk(tmp_path: Path) -> None:
    """A file system too small for the checkpoint: simulated where a small one can be mounted."""
    with small_disk(tmp_path / "small", 4) as mount:
        run = RunProcess([f"runner.output_dir={mount}/results"], tmp_path / "out.log").start()
        assert run.wait(LIMIT_S) != 0
        assert "disk" in run.text() or "free" in run.text()
        run.assert_nothing_left()
