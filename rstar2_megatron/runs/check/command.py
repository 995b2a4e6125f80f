"""`bash run_rstar2.sh NAME --check`: all checks of a YAML, their lines, the report, the exit code."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rstar2_megatron import __version__
from rstar2_megatron.cpu.devices import hide_gpus
from rstar2_megatron.runs.base_run import StopSignals
from rstar2_megatron.runs.check.context import Context
from rstar2_megatron.runs.check.nodes import Nodes
from rstar2_megatron.runs.check.result import Check, CheckResult
from rstar2_megatron.runs.check.runner import run_checks
from rstar2_megatron.runs.check.subjects import actor, collectives, engine, judge, machine, network, thin_model, whole_run
from rstar2_megatron.services.close_deadline import close_deadline
from rstar2_megatron.services.run_temporary import RunTemporary
from rstar2_megatron.settings.load import ConfigError, print_config
from rstar2_megatron.settings.placement import Slots, component_slots, gpu_problem, slots_of, visible_gpus, visible_host_gb
from rstar2_megatron.settings.planning.plan import make_plan
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.tiny.resolve import resolve_tiny

_CLOSE_LIMIT_S = 120.0
CHECKS: tuple[Check, ...] = (
    *machine.CHECKS,
    *collectives.CHECKS,
    *thin_model.CHECKS,
    *network.CHECKS,
    *actor.CHECKS,
    *engine.CHECKS,
    *judge.CHECKS,
    *whole_run.CHECKS,
)
"""In the order in which they run: what is quick and what others need comes first."""


def placed_slots(settings: Settings, slots: Slots) -> tuple[int, ...]:
    """The slots of a node that actor and engines use, by their numbers on it; of several nodes all.

    Raises ConfigError for a placement that names slots which are not there.
    """
    if settings.cluster.num_nodes > 1:
        return tuple(range(max(1, slots.count // settings.cluster.num_nodes)))
    try:
        places = component_slots(settings.cluster, slots.count)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return tuple(sorted({*places["actor"], *places["rollout"]}))


def report_path(settings: Settings) -> Path:
    """Everything that the checks found, as JSON that can be attached to an issue."""
    return Path(settings.runner.output_dir) / f"{settings.runner.experiment_name}.check.json"


def check(
    settings: Settings,
    *,
    checks: Sequence[Check] = CHECKS,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
    make_nodes: Callable[..., Nodes] = Nodes,
) -> int:
    """Make the checks; 0 when none failed, 1 otherwise, 130 or 143 when stopped.

    `make_nodes` is for tests, which plant faults in the programs that nodes run. Raises ConfigError for a YAML whose model
    cannot be made.
    """
    try:
        settings = resolve_tiny(settings, progress=say)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    gpus = visible_gpus()
    slots = slots_of(settings.cluster, gpus, visible_host_gb())
    if gpus[0] and slots.is_cpu:
        hide_gpus()
    elif gpus[0] and (problem := gpu_problem(gpus[0], os.environ.get("CUDA_VISIBLE_DEVICES"))):
        raise ConfigError(problem)  # without GPUs the check `driver` fails
    placed = placed_slots(settings, slots)
    started = time.monotonic()
    files = RunTemporary()
    output = Path(settings.runner.output_dir).resolve()
    output.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".check-{settings.runner.experiment_name}-", dir=output))
    scratch.chmod(0o755)
    nodes = make_nodes("cpu" if slots.is_cpu else "cuda", placed)
    context = Context(settings, slots, nodes, scratch)
    results: list[CheckResult] = []
    signals = StopSignals()
    signals.install()
    try:
        say(f"checking this machine for {settings.runner.experiment_name}; {len(checks)} checks, minutes on GPUs")
        results = run_checks(checks, context, say)
    except BaseException as error:
        if stopped := signals.stop_behind(error):
            say(f"stopped by {stopped}")
            return stopped.exit_code
        raise
    finally:
        signals.ignore()
        remove = functools.partial(shutil.rmtree, scratch, ignore_errors=True)
        with close_deadline(_CLOSE_LIMIT_S, 1, remove, output / "check-close.log"):
            nodes.close()
            remove()
            files.remove()
        signals.restore()
    path, seconds = report_path(settings), time.monotonic() - started
    counts = Counter(result.state for result in results)
    summary = {state: counts[state] for state in ("passed", "failed", "skipped")}
    report = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "seconds": round(seconds, 1),
        "summary": summary,
        "checks": [asdict(result) for result in results],
        "nodes": context.found.get("survey"),  # what each node said of itself
        "plan": _plan(settings).splitlines(),
        "config": print_config(settings).splitlines(),
    }
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    say(f"{', '.join(f'{count} {state}' for state, count in summary.items())} in {seconds:.0f} s; report: {path}")
    return 1 if summary["failed"] else 0


def _plan(settings: Settings) -> str:
    try:
        return make_plan(settings).render()
    except ValueError as error:
        return f"no plan: {error}"
