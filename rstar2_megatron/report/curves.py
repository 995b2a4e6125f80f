"""Curves of a run, or a comparison of several runs.

    python -m rstar2_megatron.report.curves RUN                      curves.png and the table of one run
    python -m rstar2_megatron.report.curves RUN [RUN ...] --verl PATH [...] --out DIR

RUN and PATH are run directories, directories of runs or log files, or LABEL=PATH; logs of one label are seeds of one arm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rstar2_megatron.report.compare import comparison_table, group_arms, render_text, write_comparison
from rstar2_megatron.report.draw import draw_run
from rstar2_megatron.report.read import Log, read_logs
from rstar2_megatron.report.table import render_table

__all__ = ["draw_run", "main"]


def _labelled(word: str) -> tuple[str | None, str]:
    """("ours", "results/a") of "ours=results/a"; a path that exists as written has no label."""
    label, equals, path = word.partition("=")
    return (label, path) if equals and not Path(word).exists() else (None, word)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 when nothing could be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="our or RLinf's run directories or log files")
    parser.add_argument("--verl", nargs="+", default=[], metavar="PATH", help="logs with verl's names")
    parser.add_argument("--out", type=Path, help="directory of the comparison (default: the first run)")
    parser.add_argument(
        "--levels",
        nargs="*",
        type=float,
        default=[0.25, 0.5, 0.75],
        help="rewards whose first step the table names",
    )
    arguments = parser.parse_args(argv)
    if not arguments.runs and not arguments.verl:
        parser.error("name at least one run")
    if len(arguments.runs) == 1 and not arguments.verl:
        directory = Path(_labelled(arguments.runs[0])[1])
        if (directory / "metrics.jsonl").is_file():
            return _one_run(directory, arguments.out)

    logs: list[tuple[str | None, Log]] = []
    for words, verl in ((arguments.runs, False), (arguments.verl, True)):
        for word in words:
            label, path = _labelled(word)
            logs += [(label, log) for log in read_logs(path, verl=verl)]
    messages = [message for _, log in logs for message in log.messages]
    for message in messages:
        print(f"warning: {message}", file=sys.stderr)
    arms = group_arms(logs)
    if not arms:
        print("error: none of the logs holds training curves", file=sys.stderr)
        return 1
    out = arguments.out or _default_out(logs)
    written = write_comparison(arms, messages, arguments.levels, out)
    print(render_text(*comparison_table(arms, arguments.levels)))
    print("wrote " + ", ".join(map(str, written)))
    return 0


def _default_out(logs: Sequence[tuple[str | None, Log]]) -> Path:
    first = logs[0][1].path
    return first if first.is_dir() else first.parent


def _one_run(directory: Path, out: Path | None) -> int:
    try:
        target = draw_run(directory, None if out is None else out / "curves.png")
        print(render_table(directory))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
