"""Driving programs from tests, run_rstar2.sh first, and finding what they left behind."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from tests.processes import command_line, engine_files, files_of_dead_engines

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "run_rstar2.sh"
_MARK = "RSTAR2_TEST_RUN"
_PHASES = (
    "cold_start.phases=["
    "{name: copy, data_path: 'tiny:copy', steps: 120, batch_size: 64, lr: 3.0e-3, shuffle: False, warmup_steps: 30, "
    "decay: constant},"
    "{name: conversations, data_path: 'tiny:conversations', steps: 120, batch_size: 32, lr: 1.5e-3, warmup_steps: 10}]"
)


def short_directory(prefix: str) -> Path:
    """A directory with a short path, because Ray's sockets lie below it. It is removed when this process ends."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@dataclass
class ProgramRun:
    """One running command, with a mark in its environment that all its descendants inherit."""

    command: list[str]
    output: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    # The run's own, so that what is left there is the run's.
    temporary: Path = field(default_factory=lambda: short_directory("rt-"))
    process: subprocess.Popen[bytes] | None = None
    shared: set[str] = field(default_factory=engine_files)
    """What was in /dev/shm before this run; a new process may have the pid of a dead owner."""

    def start(self) -> Self:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, _MARK: self.mark, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("RAY_ADDRESS", None)
        environment["TMPDIR"] = str(self.temporary)
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
                # a shell that put the tests into its background made them, and so all of this, ignore Ctrl-C
                preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )
        return self

    def wait(self, timeout_s: float) -> int:
        """Exit code; kills everything and fails the test when it takes longer."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"no end within {timeout_s:.0f} s; output:\n{self.text()[-4000:]}") from None

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until `condition()` while the run continues."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended before {what}; output:\n{self.text()[-4000:]}")
            if time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"no {what} within {timeout_s:.0f} s; output:\n{self.text()[-4000:]}")
            time.sleep(0.1)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from this run, also one that was adopted by init."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def assert_nothing_left(self, within_s: float = 15.0, *, killed: bool = False) -> None:
        """No process, and no temporary file either unless the run was killed and could not remove them."""
        deadline = time.monotonic() + within_s
        while (processes := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        # The engines of a test beside this one are killed too, and their files may stay until that test goes on.
        deadline = time.monotonic() + 300.0
        while (shared := files_of_dead_engines() - self.shared) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = [f"{p.pid} {' '.join(command_line(p))}"[:120] for p in processes if p.is_running()]
        self.kill_all()
        assert not names, f"left running after {within_s:.0f} s: {names}"
        assert not shared, f"left in /dev/shm: {shared}"
        if not killed:
            files = [path.name for path in self.temporary.iterdir()]
            shutil.rmtree(self.temporary)
            assert not files, f"left in the temporary directory: {files}"

    def kill_all(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


class RunProcess(ProgramRun):
    """One `bash run_rstar2.sh ...`."""

    def __init__(self, arguments: list[str], output: Path, *, temporary: Path | None = None) -> None:
        super().__init__(["bash", str(SCRIPT), *arguments], output)
        self.temporary = temporary or self.temporary


def read_jsonl(path: Path) -> list[dict]:
    """All complete rows; none when the file is not there yet."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


ONE_SLOT = (
    'cluster.component_placement={"actor,rollout,reward": 0}',
    "actor.model.tensor_model_parallel_size=1",
    "tools.codejudge.num_workers=1",
)
"""One actor rank and one engine, which start in two thirds of the time: for what does not depend on their number."""


def arguments(cache: Path, results: Path, name: str, *extra: str) -> list[str]:
    """Of a run of two small steps, with all that the tests look at; its supervised start is kept in `cache`."""
    return [
        "rstar2-tiny-cpu",
        _PHASES,
        f"cold_start.cache_dir={cache}",
        f"runner.output_dir={results}",
        f"runner.experiment_name={name}",
        "runner.max_steps=2",
        "runner.save_interval=1",
        "data.rollout_batch_size=4",
        "evaluation.num_problems=16",
        "runner.save_trajectories_per_step=64",  # all of a step
        "runner.max_empty_steps=0",  # with four problems after so short a supervised start, that is chance
        *extra,
    ]
