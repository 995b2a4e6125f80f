"""Base of every kind of run: its directory, resuming, messages, and clean-up."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rstar2_megatron.data.loader import EpochsOver
from rstar2_megatron.extension.user_code import all_user_code
from rstar2_megatron.records.checkpoint import find_resume, set_aside_behind
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.whole_file import write_json, write_text
from rstar2_megatron.runs.inputs.output_directory import resume_dir
from rstar2_megatron.runs.stopping import first_that_holds
from rstar2_megatron.services.run_temporary import RunTemporary
from rstar2_megatron.settings.load import print_config
from rstar2_megatron.settings.schema import RunnerSettings, Settings

logger = logging.getLogger(__name__)

FINISHED = "finished.json"
_RAISE_AGAIN_S = 3.0


class Stopped(BaseException):
    """SIGTERM, SIGINT or SIGHUP arrived. A BaseException, so that no handler of errors catches it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into `Stopped`; later ones are ignored while we clean up.

    Python discards an exception that is raised inside a finalizer or a library's callback. So `Stopped` is raised again
    every few seconds until `ignore`. `install` is called again after Ray has started, because Ray replaces the
    handler of SIGTERM with its own. SIGUSR2 asks for an end after the step that runs, with everything saved; runs that are
    children are asked too.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._runs: list[subprocess.Popen[bytes]] = []
        self.end_asked = False
        self.received: int | None = None
        """The signal that stopped the run; errors after it are consequences."""

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            previous = signal.signal(number, self._ask_for_end if number == signal.SIGUSR2 else self._stop)
            self._previous.setdefault(number, previous)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Raise `Stopped` no more, and ignore later signals, because the clean-up has begun or is about to."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def ask_with_us(self, run: subprocess.Popen[bytes]) -> None:
        """SIGUSR2 reaches this child as well, also if it has come already."""
        self._runs.append(run)
        if self.end_asked:
            run.send_signal(signal.SIGUSR2)

    def stop_behind(self, error: BaseException) -> Stopped | None:
        """The stop that `error` is or follows from, or None.

        A library may turn `Stopped` into an error of its own: ray.wait raises SystemError.
        """
        if self.received is None:
            return error if isinstance(error, Stopped) else None
        return Stopped(self.received)

    def _ask_for_end(self, *_: object) -> None:
        self.end_asked = True
        for run in self._runs:
            run.send_signal(signal.SIGUSR2)

    def _stop(self, signal_number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.ignore()
            self.received = signal_number
            signal.signal(signal.SIGALRM, self._stop)
            signal.setitimer(signal.ITIMER_REAL, _RAISE_AGAIN_S, _RAISE_AGAIN_S)
        raise Stopped(self.received)


class BaseRun:
    """Owns everything that a run starts; `close` ends all of it, wherever the run stopped."""

    def __init__(self, settings: Settings, signals: StopSignals) -> None:
        self.temporary = RunTemporary()
        self.settings = settings
        self.signals = signals
        self.started = time.perf_counter()
        self.directory = Path(settings.runner.output_dir) / settings.runner.experiment_name
        self.checkpoints = self.directory / "checkpoints"
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.temporary.remove)

    def train(self) -> None:
        """The whole run."""
        raise NotImplementedError

    def begin(self, total_steps: int) -> tuple[int, Path] | None:
        """Make the run's directory; returns the (step, checkpoint) to resume from, or None.

        An earlier run of this name that finished, or that has no checkpoint, is moved aside, as are checkpoints behind the
        one that `runner.resume_dir` names. A run that was killed after its last step is resumed to finish. Raises ValueError
        for a bad `runner.resume_dir`.
        """
        runner = self.settings.runner
        given = resume_dir(self.settings)
        resume = find_resume(given, self.checkpoints)
        if resume and given != runner.resume_dir:
            self._say(
                f"going on behind {runner.resume_dir}; to begin there again, move {self.checkpoints} away or take another name"
            )
        if resume and runner.resume_dir == "auto" and finished_step(self.directory, runner, total_steps) == resume[0]:
            self._archive(f"it finished with step {resume[0]}")
            resume = None
        elif resume is None and (self.directory / "metrics.jsonl").exists():
            self._archive("it has no checkpoint to resume from")
        if resume and (later := set_aside_behind(resume[0], self.checkpoints, _stamp())):
            self._say(
                f"checkpoints behind step {resume[0]} are of the steps that are made again: moved to "
                f"{', '.join(map(str, later))}"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / FINISHED).unlink(missing_ok=True)
        write_text(self.directory / "config.yaml", print_config(self.settings))
        for _, code in all_user_code(self.settings):
            code.save(self.directory)
        return resume

    def mark_finished(self, step: int, condition: str = "") -> None:
        """Note that everything of the run is on disk. `condition`: the condition that ended it before its last step, or ""."""
        seconds = round(time.perf_counter() - self.started, 1)
        write_json(self.directory / FINISHED, {"step": step, "condition": condition, "seconds": seconds})

    def _archive(self, why: str) -> None:
        """Rename the directory of an earlier run of the same name."""
        target = self.directory.with_name(f"{self.directory.name}.{_stamp()}")
        self.directory.rename(target)
        self._say(f"an earlier run of this name was moved to {target} ({why}); starting a new one")

    def _say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {line}", flush=True)

    def close(self) -> None:
        """End everything that the run started. Never raises, so that the reason of the stop is not hidden."""
        try:
            self._closing.close()
        except Exception:
            logger.debug("while closing", exc_info=True)


def _stamp() -> str:
    """For the name of what is moved aside."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def finished_step(directory: Path, runner: RunnerSettings, total_steps: int) -> int | None:
    """The last step of the run of `directory`; None when it did not finish, or when the settings ask for more.

    A run that a condition ended has no more to do while one of the settings' conditions holds; one whose epochs are over, while
    `runner.max_epochs` is the same.
    """
    path = directory / FINISHED
    if not path.is_file():
        return None
    finished: dict[str, Any] = json.loads(path.read_text())
    rows = JsonlFile(directory / "metrics.jsonl").rows() if finished["condition"] else []
    used_up = finished["condition"] == str(EpochsOver(runner.max_epochs))
    ended = finished["step"] >= total_steps or used_up or first_that_holds(runner.stop_when, rows)
    return finished["step"] if ended else None
