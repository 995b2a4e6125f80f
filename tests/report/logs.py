"""Reads a path that holds one run."""

from __future__ import annotations

from pathlib import Path

from rstar2_megatron.report.read import Log, read_logs


def read_log(path: str | Path, *, verl: bool = False) -> Log:
    (log,) = read_logs(path, verl=verl)
    return log
