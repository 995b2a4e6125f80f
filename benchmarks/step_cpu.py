"""`python -m benchmarks.step_cpu`: CPU time of a training step, compared in pairs.

`--trees OLD NEW` starts the tiny run of two checkouts in turns, each with its own `.venv`; with `--second-override` the second
has other settings, and OLD and NEW may be the same. Counted is the CPU time of all processes of the run from the end of a step
to the end of the next; the first two steps are left out. One JSON line: seconds of each step, the ratio of the means (second
over first), the middle 95% of this ratio in 2,000 resamples, and the same of the CPU time of a rollout's token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import write_result
from benchmarks.tiny_run import TinyRun

_WARM_UP = 2  # steps


def run_steps(tree: Path, overrides: Sequence[str], steps: int, limit_s: float) -> list[dict[str, float]]:
    """CPU seconds and response tokens of each step after the first two."""
    with tempfile.TemporaryDirectory(prefix="cpu-", dir="/tmp") as place:
        temporary = Path(place) / "t"
        temporary.mkdir()
        run = TinyRun(tree, Path(place), temporary, [*overrides, f"runner.max_steps={steps}"])
        try:
            marks = {step: run.cpu_s() for step in run.finished_steps(limit_s)}
            if not marks:
                raise SystemExit(f"the run of {tree} ended without a step:\n{run.output()}")
            rows = run.metrics()
        finally:
            run.close()
    return [
        {
            "step": step,
            "cpu_s": round(marks[step] - marks[step - 1], 3),
            "tokens": rows[step - 1]["rollout/response_length_all"] * rows[step - 1]["rollout/num_trajectories"],
        }
        for step in sorted(marks)
        if step > _WARM_UP and step - 1 in marks
    ]


def ratio_of(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Mean of the second over mean of the first, and the middle 95% of resamples."""
    draw = random.Random(0)

    def resampled() -> float:
        a, b = (draw.choices(values, k=len(values)) for values in (first, second))
        return statistics.fmean(b) / statistics.fmean(a)

    drawn = sorted(resampled() for _ in range(2000))
    return {
        "first_s": round(statistics.fmean(first), 3),
        "second_s": round(statistics.fmean(second), 3),
        "ratio": round(statistics.fmean(second) / statistics.fmean(first), 4),
        "ratio_95": [round(drawn[50], 4), round(drawn[-51], 4)],
        "ratio_of_medians": round(statistics.median(second) / statistics.median(first), 4),
    }


def compare_trees(options: argparse.Namespace) -> dict[str, Any]:
    overrides = (options.override, [*options.override, *options.second_override])
    steps: tuple[list[dict[str, float]], ...] = ([], [])
    for turn in range(options.rounds):
        for arm in (0, 1) if turn % 2 == 0 else (1, 0):
            steps[arm].extend(run_steps(options.trees[arm].resolve(), overrides[arm], options.steps, options.limit_s))
    first, second = ([one["cpu_s"] for one in arm] for arm in steps)
    tokens = [round(statistics.fmean(one["tokens"] for one in arm)) for arm in steps]
    a_token = ratio_of(*([1e6 * one["cpu_s"] / one["tokens"] for one in arm] for arm in steps))
    figures = {"tokens_a_step": tokens, "us_a_token": a_token, "steps": [first, second]}
    return {"case": "trees", **ratio_of(first, second), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, nargs=2, metavar=("OLD", "NEW"), required=True)
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each tree")
    parser.add_argument("--limit-s", type=float, default=1800, help="of each run")
    parser.add_argument("--override", nargs="*", default=["runner.save_interval=-1"], help="of every run")
    parser.add_argument("--second-override", nargs="*", default=[], help="of the runs of NEW, behind those of every run")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    result = compare_trees(options)
    print(json.dumps(result), flush=True)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
