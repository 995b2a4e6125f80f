"""Arms times seeds of one configuration from one file: runs what is not finished, and draws what is there.

    config: rstar2-tiny-cpu                 of every run, a name of config/ or a path
    overrides: {dotted.key: value, ...}     of every run; runner.experiment_name names the ablation
    seeds: [0, 1, 2]
    at_once: 2                              runs side by side, on CPU slots; 1 by default
    arms: {NAME: {dotted.key: value, ...}, ...}     the first is what the others are compared with

Every run starts from one model: the cold start has one seed, and its cache serves all. A seed of the file decides the order of
the problems and the sampling. Runs come seed by seed, so that an ablation that is stopped has whole seeds.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from rstar2_megatron.report.arms import changes, work_of
from rstar2_megatron.report.curves import main as draw
from rstar2_megatron.report.names import panel
from rstar2_megatron.report.read import read_logs
from rstar2_megatron.runs.base_run import Stopped, StopSignals, finished_step
from rstar2_megatron.runs.preflight import check_before_start
from rstar2_megatron.runs.stages import override_words, read_section
from rstar2_megatron.services.process import start_child, terminate_tree
from rstar2_megatron.settings.load import ConfigError, load, to_plain, users_path
from rstar2_megatron.settings.placement import slots_of
from rstar2_megatron.settings.schema import Section, Settings
from rstar2_megatron.tiny.resolve import resolve_tiny

_POLL_S = 0.5
_CLOSE_S = 90.0  # a run ends what it started
_SHOWN_LINES = 15
_ENDED_AS_ASKED = (128 + signal.SIGUSR2, -signal.SIGUSR2)  # the second in its start-up, before it has a handler


class Ablation(Section):
    """The file."""

    config: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    seeds: list[int] = Field(min_length=1)
    at_once: int = Field(1, ge=1)
    """Runs of one seed that run side by side. CPU slots only: RLinf gives a run every GPU of the machine."""
    arms: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], dict[str, Any]] = Field(min_length=1)
    metrics: list[str] = Field(min_length=1)
    """Words or names of metrics, as for --metrics of report.curves."""


@dataclass(frozen=True)
class ArmRun:
    """One arm under one seed."""

    name: str
    words: list[str]
    settings: Settings

    @property
    def directory(self) -> Path:
        return Path(self.settings.runner.output_dir) / self.name

    @property
    def log(self) -> Path:
        return self.directory.with_name(f"{self.name}.log")

    @property
    def state(self) -> str:
        """What a run of it would do."""
        runner = self.settings.runner
        if finished_step(self.directory, runner, runner.max_steps) is not None:
            return "finished"
        return "continues, if it has a checkpoint" if self.directory.is_dir() else "to run"

    def check_earlier(self) -> None:
        """Raises ConfigError when the directory holds a run of another configuration; `runner.` keys may differ."""
        path = self.directory / "config.yaml"
        if not path.is_file():
            return
        if changed := changes(yaml.safe_load(path.read_text(encoding="utf-8")), to_plain(self.settings)):
            raise ConfigError(
                f"{self.directory} holds a run with {changed[0]}; give the ablation another runner.experiment_name, or remove "
                "that directory"
            )


Runs = dict[tuple[str, int], ArmRun]
"""By arm and seed."""


def run_ablation(file: str, words: Sequence[str], arms: Sequence[str], seeds: Sequence[str], *, dry_run: bool) -> int:
    """Run the chosen arms and seeds of the file, all where none are chosen, and draw them.

    Returns 0, or 1 when a run failed; the others are run all the same. Stopped: 130, 143, or 140 after SIGUSR2, for which
    the runs under way end their step. Raises ConfigError before anything is started.
    """
    path = users_path(file)
    if not path.is_file():
        raise ConfigError(f"no file {path}; examples/ablations/tiny.yaml is one")
    ablation = read_section(path, Ablation)
    if strange := [arm for arm in arms if arm not in ablation.arms]:
        raise ConfigError(f"--arms {strange[0]}: {path.name} has no such arm; it has {', '.join(ablation.arms)}")
    if strange := [seed for seed in seeds if not seed.isdigit()]:
        raise ConfigError(f"--seeds {strange[0]}: give whole numbers, e.g. --seeds 0,1,2")
    chosen, numbers = list(arms) or list(ablation.arms), [int(seed) for seed in seeds] or ablation.seeds
    runs = _runs(ablation, words, chosen, numbers)
    if ablation.at_once > 1 and not all(slots_of(run.settings.cluster).is_cpu for run in runs.values()):
        raise ConfigError(f"at_once={ablation.at_once}: runs on GPUs come one after another, because each takes all of them")
    _check(runs, dry_run)
    for (arm, seed), run in runs.items():
        print(f"{arm}, seed {seed}: {run.state} ({run.directory})", flush=True)
    if dry_run:
        return 0
    signals = StopSignals()
    signals.install()  # so that the runs under way are ended as well
    failed = 0
    try:
        for number, seed in enumerate(numbers, 1):
            failed += _run(ablation, [runs[arm, seed] for arm in chosen], signals)
            failed += _draw(ablation, {arm: [runs[arm, s].directory for s in numbers[:number]] for arm in chosen})
    except Stopped as stopped:
        return stopped.exit_code
    finally:
        signals.ignore()
        signals.restore()
    return int(failed > 0)


def _runs(ablation: Ablation, words: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> Runs:
    """Seed by seed. Raises ConfigError with the arm's name."""
    common = override_words(ablation.overrides)
    base = load(ablation.config, [*common, *words]).settings
    root = Path(base.runner.output_dir) / base.runner.experiment_name
    runs: Runs = {}
    for seed in seeds:
        last = {"cold_start.seed": base.cold_start.seed, "actor.seed": seed, "data.seed": seed, "runner.output_dir": str(root)}
        for arm in arms:
            last["runner.experiment_name"] = f"{arm}-{seed}"
            used = [*common, *override_words(ablation.arms[arm]), *words, *override_words(last)]
            try:
                runs[arm, seed] = ArmRun(f"{arm}-{seed}", used, resolve_tiny(load(ablation.config, used).settings))
            except ConfigError as error:
                raise ConfigError(f"arm {arm}: {error}") from None
    return runs


def _check(runs: Runs, dry_run: bool) -> None:
    """All that can be known before the first run. Raises ConfigError."""
    seen: dict[str, str] = {}
    for (arm, _), run in runs.items():
        work = json.dumps(work_of(to_plain(run.settings)), sort_keys=True)
        if work not in seen:
            try:
                check_before_start(run.settings, dry_run=dry_run)
            except ValueError as error:
                raise ConfigError(f"arm {arm}: {error}") from None
        if (same := seen.setdefault(work, arm)) != arm:
            raise ConfigError(
                f"arms {same} and {arm} are one configuration; a key of theirs is overridden, or has this value anyway"
            )
        run.check_earlier()


def _run(ablation: Ablation, runs: Sequence[ArmRun], signals: StopSignals) -> int:
    """Run what is not finished, `at_once` at a time; they end with their caller. Returns how many failed.

    Raises Stopped once the runs under way have ended as SIGUSR2 asks.
    """
    waiting = [run for run in runs if run.state != "finished"]
    running: dict[subprocess.Popen[bytes], ArmRun] = {}
    failed = 0
    try:
        while running or (waiting and not signals.end_asked):
            # The first one makes the model that all start from: it is alone until it has a step.
            one_has_a_step = any((run.directory / "metrics.jsonl").is_file() for run in runs)
            if waiting and not signals.end_asked and len(running) < (ablation.at_once if one_has_a_step else 1):
                run = waiting.pop(0)
                process = _start(ablation.config, run)
                running[process] = run
                signals.ask_with_us(process)
            for process in [process for process in running if process.poll() is not None]:
                run, code = running.pop(process), process.returncode
                if code and not (signals.end_asked and code in _ENDED_AS_ASKED):
                    failed += 1
                    end = "\n".join(run.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
                    text = f"error: {run.name} ended with exit code {code}; the end of {run.log}:\n{end}"
                    print(text, file=sys.stderr, flush=True)
            time.sleep(_POLL_S)
    except BaseException:
        signals.ignore()  # another signal would leave a run alive
        for process in running:
            terminate_tree(process.pid, grace_s=_CLOSE_S)
        raise
    if signals.end_asked:
        raise Stopped(signal.SIGUSR2)
    return failed


def _start(config: str, run: ArmRun) -> subprocess.Popen[bytes]:
    """Its output lies beside its directory."""
    print(f"{run.name}: output in {run.log}", flush=True)
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", "rstar2_megatron.runs.main", config, *run.words]
    with run.log.open("ab") as file:  # behind what an earlier attempt said
        return start_child(command, file, cwd=None)


def _draw(ablation: Ablation, arms: dict[str, list[Path]]) -> int:
    """Draw the runs that have steps; returns 1 when there are none or they cannot be drawn."""
    there = {arm: [str(run) for run in runs if (run / "metrics.jsonl").is_file()] for arm, runs in arms.items()}
    held = {name for runs in there.values() for run in runs for log in read_logs(run) for name in log.series}
    shown = [word for word in ablation.metrics if panel(word).metric in held]
    if not shown:
        print(f"error: no run has a step with one of {', '.join(ablation.metrics)}", file=sys.stderr, flush=True)
        return 1
    given = [word for arm, runs in there.items() if runs for word in ("--arm", f"{arm}={','.join(runs)}")]
    out = next(run.parent for runs in arms.values() for run in runs)
    return draw([*given, "--metrics", *shown, "--x", "generated", "--paired", "--out", str(out)])
