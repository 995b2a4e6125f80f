"""Common flags, errors and final lines of the commands that make data sets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.records.disk import reason_of

_RESULTS = ("train.jsonl", "validation.jsonl", "report.json")


def data_parser(description: str | None, *, held_out: str, seed_of: str) -> argparse.ArgumentParser:
    """A parser with --out, --validation, --seed, --limit and --force; `held_out` names what is held out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--validation", type=int, default=0, help=f"{held_out} held out into validation.jsonl")
    parser.add_argument("--seed", type=int, default=0, help=f"of {seed_of}")
    parser.add_argument("--limit", type=int, help="rows read of each input, for a trial")
    parser.add_argument("--force", action="store_true", help="replace results in --out")
    return parser


def run_command(
    arguments: argparse.Namespace,
    make: Callable[[argparse.Namespace], Mapping[str, Any]],
    render: Callable[[Mapping[str, Any]], str],
) -> int:
    """Make the data set and print its report. Returns the exit code: 0, 2 for bad input, or 1 for what fails later."""
    out: Path = arguments.out
    try:
        for name, least in (("validation", 0), ("limit", 1)):
            value = getattr(arguments, name)
            if value is not None and value < least:
                raise DataError(f"--{name} must be at least {least}, got {value}")
        present = [name for name in _RESULTS if (out / name).exists()]
        if present and not arguments.force:
            raise DataError(f"{out} already holds {', '.join(present)}; choose another --out or give --force")
        report = make(arguments)
    except (DataError, OSError, ValueError) as error:
        print(f"error: {reason_of(error, out, '--out')}", file=sys.stderr)
        wrong_place = FileNotFoundError | FileExistsError | NotADirectoryError | PermissionError
        return 2 if isinstance(error, ValueError | wrong_place) else 1
    print(render(report))
    files = [f"{rows:,} rows to {out / name}" for name, rows in report["written"].items()]
    print(f"wrote {', '.join(files)}, and {out / 'report.json'}")
    return 0
