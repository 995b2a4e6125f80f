"""`python -m benchmarks.faults [--modes sync async] [--victims ...]`: each process of a tiny run killed, and what a user sees.

A run of small steps on a CPU loses those that it starts again one after the other, each within a step, with a quiet step
between them; what ends a run is killed in a run of its own. One JSON line a kill: seconds until the run said what came, or
ended; seconds that the step took longer than those beside it; trajectories dropped; the lines printed. Then a markdown table.

`--random N` kills N processes by lot, each at a moment of its step by lot. The command fails when a run does not end well, has
lost a trajectory, or leaves a file. `--seed` decides the lots.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.records import write_result
from benchmarks.tiny_run import TinyRun

VICTIMS = {  # part of the command line; whether the run goes on
    "judge": ("rstar2_megatron.judge all", True),
    "judge worker": ("rstar2_megatron.judge worker", True),
    "Redis": ("redis-server", True),
    "sandbox zygote": ("judge.sandbox.zygote", True),
    "engine": ("rollout.engine.process", True),
    "SGLang scheduler": ("sglang::scheduler", True),
    "rollout worker": ("ray::RolloutWorker", True),
    "actor rank": ("ray::ActorWorker", False),
    "reward worker": ("ray::RewardWorker", False),
}
# Enough SFT for the model to call the tool; its result is kept for the next runs.
OVERRIDES = (
    "cold_start.phases=[{name: copy, data_path: 'tiny:copy', steps: 120, batch_size: 64, lr: 3.0e-3, shuffle: False},"
    "{name: conversations, data_path: 'tiny:conversations', steps: 60, batch_size: 32, lr: 1.5e-3, warmup_steps: 10}]",
    "algorithm.sampling_params.max_new_tokens=256",
    "algorithm.group_size=16",
    "runner.save_interval=-1",
    "runner.resume_dir=null",
)
MODES = {
    "sync": (),
    "async": (
        "algorithm.max_staleness=2",
        "cluster.component_placement={actor: 0, rollout: 1, reward: 0}",
        "actor.model.tensor_model_parallel_size=1",
    ),
}
_STEP = re.compile(r"^\s+\d+\s|^\s+step\s")  # lines of every run
_PREFIX = re.compile(r"\x1b\[\d+m|\(\w+\(rank=\d+\) pid=\d+\)|WARNING:[\w.]+:|; its log: \S+|\S+/(?=results/)")
_INTO_STEP_S = 0.7
_LIMIT_S, _LIMIT_A_KILL_S = 900.0, 60.0


def kill(run: TinyRun, words: str) -> int | None:
    """SIGKILL of the first process with these words in its command line; its pid."""
    for process in run.processes():
        with contextlib.suppress(psutil.Error):
            if words in " ".join(process.cmdline()):
                process.kill()
                return process.pid
    return None


def seconds_until_said(run: TinyRun, printed: int) -> float:
    """Seconds until the run prints a line of its own after `printed` characters, or ends; at most a minute."""
    started = time.monotonic()
    while time.monotonic() - started < 60 and run.process.is_running() and run.process.status() != psutil.STATUS_ZOMBIE:
        if any(line.strip() and not _STEP.match(line) for line in run.text()[printed:].splitlines()):
            break
        time.sleep(0.1)
    return round(time.monotonic() - started, 1)


def lots(count: int, draw: random.Random) -> list[str]:
    """Victims by lot: all whose death costs nothing at any moment, which a rollout worker's may (docs/rollout.md)."""
    return draw.choices([name for name, (_, lasts) in VICTIMS.items() if lasts and name != "rollout worker"], k=count)


def _by_lot(run: TinyRun, draw: random.Random) -> float:
    """Seconds into a step of the usual length, or a little behind it."""
    return draw.uniform(0.0, 1.1 * statistics.median(row["time/step"] for row in run.metrics()))


def lose(mode: str, victims: list[str], place: Path, draw: random.Random | None = None) -> list[dict[str, Any]]:
    """One run; a row a victim. With `draw` each is killed at a moment of its step by lot."""
    temporary = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    steps = 2 * len(victims) + 2
    shutil.rmtree(place / "results", ignore_errors=True)  # an earlier call's steps are not this run's
    run = TinyRun(Path.cwd(), place, temporary, [*OVERRIDES, *MODES[mode], f"runner.max_steps={steps}"])
    rows: list[dict[str, Any]] = []
    try:
        for step in run.finished_steps(_LIMIT_S + _LIMIT_A_KILL_S * len(victims)):
            if step % 2 and len(rows) < len(victims):
                time.sleep(_by_lot(run, draw) if draw else _INTO_STEP_S)
                victim, printed = victims[len(rows)], len(run.text())
                pid = kill(run, VICTIMS[victim][0])
                rows.append({"case": "kill", "mode": mode, "victim": victim, "pid": pid, "step": step + 1, "from": printed})
                rows[-1]["seconds"] = seconds_until_said(run, printed)
    finally:
        run.close()
        left = sorted(path.name for path in temporary.iterdir())
        shutil.rmtree(temporary, ignore_errors=True)
    if not rows:
        raise SystemExit(run.output())
    metrics = {row["step"]: row for row in run.metrics()}
    text, ends = run.text(), [row["from"] for row in rows[1:]]
    for row, end in zip(rows, [*ends, None], strict=True):
        lines = text[row.pop("from") : end].splitlines()
        told = metrics.get(row["step"], {})
        row["said"] = [line for line in lines if line.strip() and not _STEP.match(line)][:6]
        beside = [metrics[n]["time/step"] for n in (row["step"] - 1, row["step"] + 1) if n in metrics]
        row["longer_s"] = round(told["time/step"] - statistics.fmean(beside), 1) if told else None
        row["dropped"] = told.get("rollout/dropped_infrastructure")
    rows[-1] |= {"exit_code": run.exit_code, "left_in_tmpdir": left}
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| Killed | Mode | Said after | Step longer by | Dropped | What the user reads |", "|---|---|---:|---:|---:|---|"]
    for row in rows:
        own = [_PREFIX.sub("", line).strip() for line in row["said"] if "(raylet)" not in line]
        said = " / ".join(line[:200] for line in own[:2]).replace("|", "\\|")
        longer = f"{max(row['longer_s'], 0):.0f} s" if row["longer_s"] is not None else "the run ends"
        dropped = "" if row["dropped"] is None else f"{row['dropped']:.0f}"
        lines.append(f"| {row['victim']} | {row['mode']} | {row['seconds']:.0f} s | {longer} | {dropped} | {said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--random", type=int, metavar="N", help="kill N by lot instead of each of --victims once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--place", type=Path, help="a directory that keeps the model of the SFT for the next call")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    place = options.place or Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    place.mkdir(parents=True, exist_ok=True)
    draw = random.Random(options.seed) if options.random else None
    runs = [[victim] for victim in options.victims if not VICTIMS[victim][1]]
    if draw:
        runs = [lots(options.random, draw)]
    elif lasting := [victim for victim in options.victims if VICTIMS[victim][1]]:
        runs.insert(0, lasting)
    rows = []
    for mode in options.modes:
        for victims in runs:
            for row in lose(mode, victims, place, draw):
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(table(rows))
    write_result(options.out, {"case": "faults", "rows": rows})
    if options.place is None:
        shutil.rmtree(place, ignore_errors=True)
    if draw and any(row.get("exit_code") or row["dropped"] or row.get("left_in_tmpdir") for row in rows):
        raise SystemExit("a run did not end well, or something was lost")


if __name__ == "__main__":
    main()
