"""`python -m benchmarks.verl.seconds [NAME] [key=value ...]`: a step of verl and of this project, in turns.

Plain GRPO of both from one model, with the same problems, batch, lengths, SGLang and judge, one actor process and one engine
each, and every core for whichever of them computes. Each of `--rounds` runs both, in alternating order. The first and the last
of `--steps` are left out: the first holds what happens once, the last this project's checkpoint, which verl does not write. One
JSON line: for both arms wall seconds of a step by part, CPU seconds of a step by kind of process, response tokens of a step,
seconds until the first step, and the largest memory (proportional set sizes); the ratio of this project to verl of each, with
the middle 95% in 2,000 resamples of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import Descendants
from benchmarks.records import write_result
from benchmarks.verl.beside import VERL, Beside, arm_words
from rstar2_megatron.report.read import read_logs
from rstar2_megatron.settings.load import CONFIG_DIR, load_settings
from rstar2_megatron.tiny.resolve import resolve_tiny

OURS = "grpo"
_CORES = len(os.sched_getaffinity(0))
SAME_PLACE = (
    'cluster.component_placement={"actor,rollout,reward": 0}',
    "actor.model.tensor_model_parallel_size=1",
    f"actor.cpu_threads={_CORES}",  # actor and engine take turns
    f"rollout.cpu_threads={_CORES}",
    "runner.save_interval=-1",
    "runner.val_check_interval=-1",
    "evaluation.before_and_after=False",
    "runner.max_empty_steps=0",
)
# Parts of a step's wall time: this project's `time/...`, and verl's `timing_s/...`. What is in none is the rest.
_PARTS = {
    OURS: {
        "rollout": ("rollout",),
        "reward": ("reward",),
        "training": ("resample", "batch", "training"),
        "weights": ("sync_weights",),
    },
    VERL: {
        "rollout": ("gen",),
        "reward": ("reward",),
        "training": ("old_log_prob", "adv", "update_actor"),
        "weights": ("update_weights",),
    },
}
# Kinds of process by a part of the command line; the first match counts.
_KINDS = (
    ("sglang", "engine"),
    ("rollout.engine.process", "engine"),
    ("ActorWorker", "actor"),
    ("WorkerDict", "actor"),
    ("rstar2_megatron.judge", "judge"),
    ("redis", "judge"),
)


def _kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline()) or process.name()
    return next((kind for part, kind in _KINDS if part in words), "rest")


class Watch:
    """CPU seconds and memory of what this process starts, at each new line of a log. A context manager."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.lines: list[tuple[float, dict[str, float]]] = []  # seconds since the start, CPU seconds by kind of process
        self.seen = Descendants(_kind_of)
        self._over = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        next_look = 0.0
        while not self._over.wait(0.05):
            if self._count_lines():
                continue
            if time.monotonic() > next_look:
                self.seen.look()
                next_look = time.monotonic() + 2.0
        self._count_lines()

    def _count_lines(self) -> int:
        """New lines of the log, each with what had been spent when it was seen."""
        written = self.log.read_bytes().count(b"\n") if self.log.exists() else 0
        new = written - len(self.lines)
        if new:
            self.seen.look()
            self.lines += [(time.monotonic() - self._started, self.seen.cpu_s())] * new
        return new


def run_of(arm: str, beside: Beside, log: Path, trajectories: int) -> dict[str, Any]:
    """One run: its steps but the first and the last, the seconds until the first one, and its memory.

    `trajectories` are those of a step.
    """
    with Watch(log) as watch:
        beside.run()
    steps = list(_steps(arm, log, watch.lines, trajectories))
    first_wall = steps[0]["wall_s"]["step"]
    return {"steps": steps[1:-1], "start_s": watch.lines[0][0] - first_wall, "peak_gb": sum(watch.seen.peak_gb.values())}


def _steps(arm: str, log: Path, lines: Sequence[tuple[float, dict[str, float]]], trajectories: int) -> Iterator[dict[str, Any]]:
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rows = [row.get("data", row) for row in rows]
    series = read_logs(log if arm == VERL else log.parent)[0].series
    prefix = "timing_s/" if arm == VERL else "time/"
    before: dict[str, float] = {}
    for number, (row, (_, cpu)) in enumerate(zip(rows, lines, strict=True)):
        wall = {part: sum(row.get(prefix + name, 0.0) for name in names) for part, names in _PARTS[arm].items()}
        wall["step"] = row[prefix + "step"]
        wall["rest"] = wall["step"] - sum(seconds for part, seconds in wall.items() if part != "step")
        spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in cpu.items()}
        spent["step"] = sum(spent.values())
        before = cpu
        length = list(series["rollout/response_length_all"].values())[number]
        yield {"wall_s": wall, "cpu_s": spent, "tokens": length * trajectories}


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over the steps of all runs, by name."""
    steps = [step for run in runs for step in run["steps"]]
    found = {}
    for what in ("wall_s", "cpu_s"):
        for part in sorted({part for step in steps for part in step[what]}):
            found[f"{what}/{part}"] = statistics.fmean(step[what].get(part, 0.0) for step in steps)
    tokens = statistics.fmean(step["tokens"] for step in steps)
    found |= {
        "tokens": tokens,
        "wall_ms_a_token": 1e3 * found["wall_s/step"] / tokens,
        "cpu_ms_a_token": 1e3 * found["cpu_s/step"] / tokens,
    }
    for what in ("start_s", "peak_gb"):
        found[what] = statistics.fmean(run[what] for run in runs)
    return found


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Both arms' figures, and ours over verl's with the middle 95% of resampled rounds."""
    draw = random.Random(0)
    means = {arm: figures(of_arm) for arm, of_arm in runs.items()}
    shared = [name for name in means[VERL] if means[VERL][name] > 0 and name in means[OURS]]
    drawn: dict[str, list[float]] = {name: [] for name in shared}
    for _ in range(2000):
        rounds = draw.choices(range(len(runs[VERL])), k=len(runs[VERL]))  # of both arms: the machine's speed changes
        again = {arm: figures([of_arm[number] for number in rounds]) for arm, of_arm in runs.items()}
        for name in shared:
            drawn[name].append(again[OURS].get(name, 0.0) / again[VERL][name] if again[VERL].get(name) else 0.0)
    ratios = {
        name: [
            round(value, 3)
            for value in (means[OURS][name] / means[VERL][name], sorted(drawn[name])[50], sorted(drawn[name])[-51])
        ]
        for name in shared
    }
    rounded = {arm: {name: round(value, 3) for name, value in of_arm.items()} for arm, of_arm in means.items()}
    return {"case": "seconds beside verl", **rounded, "ours_over_verl": ratios}


def draw_figure(result: dict[str, Any], path: Path) -> None:
    """Stacked bars: wall seconds by part, CPU seconds by kind of process."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6))
    for axis, what, label in zip(axes, ("wall_s/", "cpu_s/"), ("wall seconds a step", "CPU seconds a step"), strict=True):
        parts = sorted({name for arm in (VERL, OURS) for name in result[arm] if name.startswith(what)} - {what + "step"})
        bottom = [0.0, 0.0]
        for part in parts:
            heights = [result[arm].get(part, 0.0) for arm in (VERL, OURS)]
            axis.bar(["verl", "this project"], heights, bottom=bottom, label=part.removeprefix(what), width=0.6)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axis.set_ylabel(label)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="rstar2-tiny-cpu", metavar="NAME")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of each run, with the first and the last")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_intermixed_args()
    if options.steps < 3:
        parser.error(f"--steps {options.steps} leaves none to count without the first and the last; give 3 or more")
    runs: dict[str, list[dict[str, Any]]] = {VERL: [], OURS: []}
    words = [*SAME_PLACE, *options.overrides, f"runner.max_steps={options.steps}"]
    python = CONFIG_DIR.parent / ".venv-verl" / "bin" / "python"
    settings = resolve_tiny(load_settings(options.config, [*words, *arm_words(OURS, load_settings(options.config, words))]))
    trajectories = settings.data.rollout_batch_size * settings.algorithm.group_size
    project = settings.runner.logger.project_name
    with tempfile.TemporaryDirectory(prefix="seconds-", dir="/tmp") as place:
        Beside(options.config, words, [], [], Path(place), python).start_model(settings)
        for number in range(options.rounds):
            for arm in (VERL, OURS) if number % 2 == 0 else (OURS, VERL):
                out = Path(place) / f"{number}-{arm}"
                beside = Beside(options.config, words, [arm], [number], out, python)
                name = f"{arm}-{number}"
                inside = Path("logs", project, f"{name}.jsonl") if arm == VERL else Path("metrics.jsonl")
                runs[arm].append(run_of(arm, beside, out / name / inside, trajectories))
                print(json.dumps({"round": number, "arm": arm, **runs[arm][-1]}), flush=True)
    result = compared(runs) | {"runs": runs}
    print(json.dumps(result), flush=True)
    write_result(options.out, result)
    if options.figure:
        draw_figure(result, options.figure)


if __name__ == "__main__":
    main()
