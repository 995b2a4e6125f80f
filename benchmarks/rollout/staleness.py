"""`python -m benchmarks.rollout.staleness`: training while rolling out against rolling out, then training.

    python -m benchmarks.rollout.staleness --seeds 0 1 2 --steps 20 --out results/staleness [NAME] [key=value ...]

The actor has one CPU slot, the engine the other. Each seed runs with `algorithm.max_staleness` 0 and 1 in turns, from one cold
start. One JSON line: wall seconds a step without the first, their ratio (1 over 0) with the middle 95% of its resamples,
the same for each group that is trained on (with S > 0 other problems replace rejected groups, so its batches are full), idle
time of trainer and engine, and held-out pass@1 of each seed. `cores_busy` is the share of all cores' time that the whole
machine used in these steps: with S = 0 it is about the smallest ratio that the cores allow. A finished run is not repeated, so
after a stop the same command continues. The curves of both are drawn against wall time.

With `--tool-delay-s` every answer of the judge comes that much later, as from slow tools: waits that need no core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from benchmarks.records import write_result
from benchmarks.rollout.slow_judge import slow_judge
from benchmarks.step_cpu import ratio_of
from benchmarks.verl.beside import Beside, seed_words
from rstar2_megatron.report.curves import main as draw
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.tiny.resolve import resolve_tiny

BOUNDS = (0, 1)
APART = (
    "cluster.component_placement={actor: 0, rollout: 1, reward: 0}",
    "actor.model.tensor_model_parallel_size=1",
    "runner.save_interval=-1",
    "runner.val_check_interval=-1",
)
PANELS = ("pass-rate", "reward", "tool-errors")
_IDLE = ("rollout/engine/trainer_idle_seconds", "rollout/engine/engine_idle_seconds")


@contextlib.contextmanager
def core_seconds(directory: Path) -> Iterator[None]:
    """Write `cores.jsonl`: the seconds that all cores of the machine were busy, and all their seconds, after each step."""

    def watch() -> None:
        steps = 0
        with (directory / "cores.jsonl").open("w", encoding="utf-8") as file:
            while not over.wait(0.1):
                with contextlib.suppress(FileNotFoundError):
                    found = (directory / "metrics.jsonl").read_text(encoding="utf-8").count("time/step")
                    if found > steps:
                        steps, times = found, psutil.cpu_times()
                        file.write(json.dumps([sum(times) - times.idle - times.iowait, sum(times)]) + "\n")
                        file.flush()

    over = threading.Event()
    directory.mkdir(parents=True, exist_ok=True)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class Pairs(Beside):
    """Runs of both bounds, from one model."""

    def run_with_delay(self, delay_s: float) -> dict[int, list[Path]]:
        """As `run_all`, with answers of the judge that come `delay_s` later."""
        if not delay_s:
            return self.run_all()
        settings = resolve_tiny(load_settings(self.config, self.overrides))
        self.out.mkdir(parents=True, exist_ok=True)
        with slow_judge(settings.tools.codejudge, delay_s, self.out / "judge.log") as port:
            named = ["tools.codejudge.host_addr=127.0.0.1", f"tools.codejudge.host_port={port}"]
            return replace(self, overrides=[*self.overrides, *named]).run_all()

    def run_all(self) -> dict[int, list[Path]]:
        """Directories of the finished runs by bound, in the order of the seeds."""
        settings = resolve_tiny(load_settings(self.config, self.overrides))
        self.out.mkdir(parents=True, exist_ok=True)
        start = self.start_model(settings)
        found: dict[int, list[Path]] = {bound: [] for bound in BOUNDS}
        for seed in self.seeds:
            for bound in BOUNDS if seed % 2 else BOUNDS[::-1]:
                words = [*start, *seed_words(seed), f"algorithm.max_staleness={bound}"]
                name = f"s{bound}-{seed}"
                has_run = (self.out / name / "finished.json").is_file()
                with contextlib.nullcontext() if has_run else core_seconds(self.out / name):
                    found[bound].append(self._run_ours(name, words, settings.runner.max_steps))
        return found


def figures(directory: Path) -> dict[str, Any]:
    """Of one run, without its first step: means of a step, the share of busy core time; held-out pass@1 at its end."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row][1:]
    idle = {
        name.rpartition("/")[2]: round(mean(row[name] for row in rows), 2) for name in _IDLE if all(name in row for row in rows)
    }
    marks = [json.loads(line) for line in (directory / "cores.jsonl").read_text().splitlines()]
    busy, passed = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    return {
        "step_s": round(mean(row["time/step"] for row in rows), 2),
        "groups_trained": round(mean(row["rollout/groups_kept"] for row in rows), 2),
        "cores_busy": round(busy / passed, 3),
        **idle,
        "held_out": json.loads((directory / "held_out.json").read_text())["after_rl"],
    }


def summary(runs: dict[int, list[Path]], seeds: Sequence[int]) -> dict[str, Any]:
    found = {bound: [figures(directory) for directory in runs[bound]] for bound in BOUNDS}
    seconds = {bound: [each["step_s"] for each in found[bound]] for bound in BOUNDS}
    a_group = {bound: [each["step_s"] / each["groups_trained"] for each in found[bound]] for bound in BOUNDS}
    return {
        "case": "staleness",
        "seeds": list(seeds),
        **{f"max_staleness={bound}": found[bound] for bound in BOUNDS},
        "step_s_1_over_0": ratio_of(seconds[0], seconds[1]),
        "group_s_1_over_0": ratio_of(a_group[0], a_group[1]),
        "held_out_mean": {str(bound): round(mean(each["held_out"] for each in found[bound]), 4) for bound in BOUNDS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="NAME and key=value of the runs (rstar2-tiny-cpu)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tool-delay-s", type=float, default=0.0, help="of every answer of the judge")
    parser.add_argument("--out", type=Path, default=Path("results/staleness"))
    parser.add_argument("--result", type=Path, help="JSON file for the result")
    options = parser.parse_intermixed_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: the first step is not counted, give 2 or more")
    names = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    pairs = Pairs(
        (names or ["rstar2-tiny-cpu"])[0],
        [*APART, *overrides, f"runner.max_steps={options.steps}"],
        [f"s{bound}" for bound in BOUNDS],
        options.seeds,
        options.out,
        Path(sys.executable),
    )
    runs = pairs.run_with_delay(options.tool_delay_s)
    result = {**summary(runs, options.seeds), "tool_delay_s": options.tool_delay_s}
    print(json.dumps(result), flush=True)
    write_result(options.result, result)
    arms = [f"staleness {bound}={','.join(map(str, paths))}" for bound, paths in runs.items()]
    words = [word for arm in arms for word in ("--arm", arm)]
    return draw([*words, "--metrics", *PANELS, "--x", "time", "--out", str(options.out)])


if __name__ == "__main__":
    sys.exit(main())
