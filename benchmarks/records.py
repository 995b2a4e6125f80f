"""Results of benchmarks as they are kept in benchmarks/results: rows, each with the command that made it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NAMES = ("scenario", "policy", "case")


def keep_rows(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a JSON file, in the place of older ones of the same scenario, policy and case. None: nowhere."""
    if path is None:
        return
    module = Path(sys.argv[0]).stem
    about = {
        "command": " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    new = {tuple(row.get(name) for name in _NAMES) for row in rows}
    kept = [row for row in kept if tuple(row.get(name) for name in _NAMES) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in [*kept, *({**row, **about} for row in rows)])
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
