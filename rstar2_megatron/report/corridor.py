"""Bands of metrics over earlier seeds, which `runner.corridor` holds a later run against. Pure but for its file.

    python -m rstar2_megatron.report.corridor RUN RUN RUN [...] --out FILE [--metrics WORD ...] [--width 4]

The runs are seeds of one configuration. A band at a step is mean +- width * deviation * sqrt(1 + 1 / seeds), as for a
further seed, of means over the last 5 steps. The deviation is that of the step, at least the mean one of all steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rstar2_megatron.records.whole_file import write_json
from rstar2_megatron.report.arms import check_arms, group_runs, last_values
from rstar2_megatron.report.draw import points
from rstar2_megatron.report.names import panel
from rstar2_megatron.report.read import read_logs
from rstar2_megatron.report.table import WEIGHTS

LAST = 5  # steps that are averaged
LEAST_RUNS = 3
METRICS = ("pass-rate", "length-all", "tool-errors", "turns", "calls", "no-call", "void-turns", "entropy", "grad-norm")


class Corridor(BaseModel):
    runs: list[str]
    metrics: dict[str, dict[int, tuple[float, float]]]
    """Of each metric (low, high) at each step from 1."""

    def outside(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """(metric, sentence) of each that is outside its band after the last of `rows`; steps without a band are not judged."""
        step = int(rows[-1]["step"])
        for name, bands in self.metrics.items():
            values = last_values({int(s): value for s, value in zip(*points(rows, name))}, step, LAST)
            if step in bands and values:
                (low, high), mean = bands[step], statistics.fmean(values)
                if not low <= mean <= high:  # NaN is outside
                    seeds = f"{low:.4g} to {high:.4g} by {len(self.runs)} earlier seeds"
                    yield name, f"{name} is {mean:.4g} at step {step} (mean of {len(values)} steps), outside of {seeds}"


def read_corridor(path: Path) -> Corridor:
    """Raises ValueError for a file that is missing or of another form."""
    try:
        return Corridor.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = str(error.strerror)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))} {first['msg']}"
    raise ValueError(f"{path}: {why}; make it by python -m rstar2_megatron.report.corridor")


def make_corridor(runs: Sequence[str], words: Sequence[str], width: float) -> Corridor:
    """Raises ValueError for runs that are no seeds of one configuration, or without these metrics."""
    arms = group_runs([log for path in runs for log in read_logs(path)])
    check_arms(arms)
    if len(arms) > 1:
        raise ValueError(f"{' and '.join(arm.label for arm in arms)} are no seeds of one saved configuration")
    (arm,) = arms
    if len(arm.logs) < LEAST_RUNS:
        raise ValueError(f"{len(arm.logs)} runs tell no spread of seeds; give {LEAST_RUNS} or more, better 5")
    metrics = {}
    for name in (panel(word).metric for word in words):
        curve = arm.curve(name, LAST)
        if not curve and name in WEIGHTS and tuple(words) == METRICS:
            continue  # runs without calls
        if not curve:
            raise ValueError(f"not every run has {name}")
        usual = statistics.fmean(point.deviation for point in curve.values())  # few seeds may agree at a step by chance
        wide = width * math.sqrt(1 + 1 / len(arm.logs))
        half = {step: wide * max(point.deviation, usual) for step, point in curve.items()}
        metrics[name] = {step: (point.mean - half[step], point.mean + half[step]) for step, point in curve.items()}
    return Corridor(runs=[log.label for log in arm.logs], metrics=metrics)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for runs that make no corridor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--metrics", nargs="+", action="extend", metavar="WORD", help="as for report.curves")
    parser.add_argument("--width", type=float, default=4.0, help="standard deviations (4)")
    arguments = parser.parse_args(argv)
    words = arguments.metrics or METRICS
    try:
        corridor = make_corridor(arguments.runs, words, arguments.width)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, json.loads(corridor.model_dump_json()))
    left_out = [word for word in words if panel(word).metric not in corridor.metrics]
    without = f", without {', '.join(left_out)}: a run has no calls" if left_out else ""
    print(f"wrote {arguments.out}: {len(corridor.metrics)} metrics of {len(corridor.runs)} seeds{without}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
