"""Executes a loaded configuration: check, plan, run, clean up; the result is an exit code."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Collection

from rstar2_megatron.cpu.devices import hide_gpus
from rstar2_megatron.extension.user_code import all_user_code
from rstar2_megatron.records.disk import reason_of
from rstar2_megatron.runs.base_run import BaseRun, StopSignals
from rstar2_megatron.runs.inputs.output_directory import held_directory, run_directory
from rstar2_megatron.runs.preflight import check_before_start
from rstar2_megatron.services.close_deadline import close_deadline
from rstar2_megatron.settings.load import ConfigError
from rstar2_megatron.settings.placement import slots_of, visible_gpus
from rstar2_megatron.settings.planning.plan import make_plan
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.settings.variant import Origins, algorithm_rows
from rstar2_megatron.tiny.resolve import resolve_tiny

logger = logging.getLogger(__name__)
_RUNS = {
    "reasoning": ("rl_run", "RLRun"),
    "sft": ("sft_run", "SFTRun"),
    "preference": ("preference_run", "PreferenceRun"),
    "search": ("search_run", "SearchRun"),
    "difficulty_filter": ("filter_run", "FilterRun"),
}
_CLOSE_LIMIT_S = 75.0  # for workers, engines, judge and Ray; below the grace period of a recipe


def execute(settings: Settings, *, dry_run: bool, origins: Origins | None = None, later: Collection[str] = ()) -> int:
    """Run the program for a loaded configuration; returns the exit code. Raises ConfigError for bad input.

    origins: of the keys, for the `algorithm` block of the plan. later: as for `check_before_start`.
    """
    try:
        settings = resolve_tiny(settings, progress=lambda line: print(line, flush=True))
        for warning in check_before_start(settings, dry_run=dry_run, later=later):
            print(f"warning: {warning}", file=sys.stderr)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    except OSError as e:  # a file that cannot be read or written
        raise ConfigError(f"{e.filename or 'a file'}: {e.strerror or e}; check that it is there and who may use it") from e
    gpus = visible_gpus()
    if gpus[0] and slots_of(settings.cluster, gpus).is_cpu:
        hide_gpus()
    plan = make_plan(settings)
    if origins is not None and settings.runner.task_type == "reasoning":
        plan.rows += [("algorithm", key, value) for key, value in algorithm_rows(settings, origins)]
    plan.rows += [("your code", key, f"{code.reference}  (sha256 {code.sha256[:12]})") for key, code in all_user_code(settings)]
    print(plan.render(), flush=True)
    if not plan.fits:
        raise ConfigError("the plan does not fit; the lines above say why and what to change")
    if dry_run:
        return 0
    with held_directory(settings):
        return _run(settings)


def _run(settings: Settings) -> int:
    signals = StopSignals()
    signals.install()
    run: BaseRun | None = None
    code = 1
    try:
        started = time.perf_counter()
        run = make_run(settings, signals)
        run.started = started  # includes the import of torch, Ray and RLinf
        run.train()
        code = 0
    except BaseException as e:
        if stopped := signals.stop_behind(e):
            code = stopped.exit_code
            with contextlib.suppress(OSError):  # the terminal may be what has closed
                print(f"\nstopped by {stopped}; ending what this run started", file=sys.stderr, flush=True)
        elif isinstance(e, (ValueError, RuntimeError, OSError)):
            print(f"\nerror: {reason_of(e, run_directory(settings), 'runner.output_dir')}", file=sys.stderr, flush=True)
            logger.debug("failed", exc_info=True)
        else:
            raise
    finally:
        signals.ignore()
        if run is not None:
            log = run.directory / "logs" / "close.log"
            with close_deadline(_CLOSE_LIMIT_S, code, run.temporary.remove, log):
                run.close()
        signals.restore()
    return code


def make_run(settings: Settings, signals: StopSignals) -> BaseRun:
    """The run of `runner.task_type`.

    Runs are imported here, because torch, Ray and RLinf take seconds; a dry run and bad input need none of them.
    """
    module, name = _RUNS[settings.runner.task_type]
    kind: type[BaseRun] = getattr(importlib.import_module(f"rstar2_megatron.runs.{module}"), name)
    return kind(settings, signals)
