"""Curves of a run, or a comparison of several runs.

    python -m rstar2_megatron.report.curves RUN                      curves.png and the table of one run
    python -m rstar2_megatron.report.curves RUN [RUN ...] --verl PATH [...] --out DIR
    python -m rstar2_megatron.report.curves --arm grpo=results/a,results/b --arm roc=results/c --metrics reward entropy

RUN and PATH are run directories, directories of runs or log files. Runs are seeds of one arm when --arm says so, or when
their saved configurations are equal but for the seed. Differences are against the first arm. One run with --metrics, --x,
--last, --levels or --strict is drawn as a comparison of one arm is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rstar2_megatron.report.arms import CLOCKS, Arm, check_arms, group_runs
from rstar2_megatron.report.compare import RunComparison
from rstar2_megatron.report.comparison_files import write_comparison
from rstar2_megatron.report.draw import draw_run
from rstar2_megatron.report.names import DEFAULT_PANELS, PANELS, panel
from rstar2_megatron.report.read import read_logs
from rstar2_megatron.report.table import WEIGHTS, render_table

_OF_A_COMPARISON = ("metrics", "x", "last", "levels", "strict")  # options without a meaning in curves.png and its table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories or log files")
    parser.add_argument("--verl", nargs="+", action="extend", default=[], metavar="PATH", help="logs with verl's names")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=PATH,PATH", help="runs that are seeds of one arm")
    parser.add_argument(
        "--metrics",
        nargs="+",
        action="extend",
        metavar="WORD",
        help=f"panels: {', '.join(PANELS)}, or any metric's name (default: {' '.join(DEFAULT_PANELS)})",
    )
    parser.add_argument("--x", choices=CLOCKS, default="step", help="horizontal axis (step)")
    parser.add_argument("--last", type=int, default=5, help="steps that smooth curves and that final values are means of (5)")
    parser.add_argument(
        "--levels", nargs="*", type=float, default=[0.25, 0.5, 0.75], help="rewards whose first step the table names"
    )
    parser.add_argument("--paired", action="store_true", help="intervals over the differences of runs with equal seeds")
    parser.add_argument("--strict", action="store_true", help="end with an error where a log has a fault")
    parser.add_argument("--out", type=Path, help="directory of the comparison (default: the first run)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when one of the named logs gave nothing; 2 when none did, runs were named wrongly, or by --strict."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not (arguments.runs or arguments.verl or arguments.arm):
        parser.error("name at least one run")
    if arguments.last < 1:
        parser.error(f"--last {arguments.last}: give at least 1")
    one = Path(arguments.runs[0]) if len(arguments.runs) == 1 and not (arguments.verl or arguments.arm) else None
    one = one if one and (one / "metrics.jsonl").is_file() else None
    if one and arguments.paired:
        parser.error("--paired compares runs of equal seeds, and one run is named: name the runs of another arm too")
    try:
        if one and all(getattr(arguments, name) == parser.get_default(name) for name in _OF_A_COMPARISON):
            target = draw_run(one, None if arguments.out is None else arguments.out / "curves.png")
            print(f"{render_table(one)}\nwrote {target}")
            return 0
        comparison = _compare(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for fault in comparison.faults:
        print(f"{'error' if arguments.strict else 'warning'}: {fault}", file=sys.stderr)
    if comparison.faults and arguments.strict:
        return 2
    first = comparison.arms[0].logs[0].path
    out = arguments.out or (first if first.is_dir() else first.parent)
    try:
        written = write_comparison(comparison, out)
    except OSError as error:
        print(f"error: --out {out} cannot be written: {error}", file=sys.stderr)
        return 1
    print(comparison.text)
    print("wrote " + ", ".join(map(str, written)))
    return 1 if comparison.messages else 0


def _compare(arguments: argparse.Namespace) -> RunComparison:
    """Reads the logs and groups them. Raises ValueError."""
    arms = []
    for word in arguments.arm:
        label, equals, paths = word.partition("=")
        if not (label and equals and paths):
            raise ValueError(f"--arm {word}: write NAME=PATH,PATH")
        arms.append(Arm(label, [log for path in paths.split(",") for log in read_logs(path)]))
    if len({arm.label for arm in arms}) < len(arms):
        raise ValueError(f"two --arm have one name: {', '.join(arm.label for arm in arms)}")
    single = [log for path in arguments.runs for log in read_logs(path)]
    single += [log for path in arguments.verl for log in read_logs(path, verl=True)]
    arms += group_runs(single)
    check_arms(arms)
    empty = [message for arm in arms for log in arm.logs if not log.series for message in log.messages]
    with_curves = [Arm(arm.label, [log for log in arm.logs if log.series]) for arm in arms]
    with_curves = [arm for arm in with_curves if arm.logs]
    if not with_curves:
        raise ValueError(f"none of the logs holds training curves: {'; '.join(empty)}")
    held = {name for arm in with_curves for log in arm.logs for name in log.series}
    panels = [panel(word) for word in arguments.metrics or DEFAULT_PANELS]
    without = [shown for shown in panels if shown.metric in WEIGHTS and shown.metric not in held]
    empty += [f"{shown.metric}: no run has a step that counts for it" for shown in without]
    panels = [shown for shown in panels if shown not in without]
    if arguments.metrics and not all(shown.metric in held for shown in panels):
        missing = ", ".join(shown.metric for shown in panels if shown.metric not in held)
        raise ValueError(f"no log has {missing}; --metrics takes {', '.join(PANELS)}, or a metric's name")
    panels = [shown for shown in panels if shown.metric in held] or [panel("reward")]
    metrics = [shown.metric for shown in panels]
    empty += [
        f"{log.path}: has none of {', '.join(metrics)}; --metrics draws others, e.g. {', '.join(sorted(log.series)[:3])}"
        for arm in with_curves
        for log in arm.logs
        if not any(metric in log.series for metric in metrics)
    ]
    for arm in with_curves:
        if not arm.clock(arguments.x):
            raise ValueError(f"{arm.label} does not log what --x {arguments.x} needs; --x step always works")
    return RunComparison(with_curves, panels, arguments.x, arguments.last, arguments.levels, empty, arguments.paired)


if __name__ == "__main__":
    raise SystemExit(main())
