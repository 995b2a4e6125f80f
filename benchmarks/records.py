"""Results of benchmarks as they are kept in benchmarks/results, with the command that made them."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.records.whole_file import replacing, write_json

_NAMES = ("scenario", "policy", "case")


def about_this_run() -> dict[str, Any]:
    """The command, when it was, and the machine's cores and load (mean over one minute)."""
    spec = sys.modules["__main__"].__spec__  # of `python -m MODULE`
    module = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a JSON file: what is known about this run, then its result. None: nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**about_this_run(), **result})


def keep_rows(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a JSON file, in the place of older ones of the same scenario, policy and case. None: nowhere."""
    if path is None:
        return
    about = about_this_run()
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    new = {tuple(row.get(name) for name in _NAMES) for row in rows}
    kept = [row for row in kept if tuple(row.get(name) for name in _NAMES) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    told = [row | {name: value for name, value in about.items() if name not in row} for row in rows]
    lines = ",\n".join(json.dumps(row) for row in kept + told)
    with replacing(path) as file:
        file.write(f"[\n{lines}\n]\n")
