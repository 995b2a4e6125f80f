"""`metrics.jsonl`: one object a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rstar2_megatron.records.whole_file import replacing


class MetricsFile:
    """`metrics.jsonl`: one object a step, on disk before `append` returns."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Write one step. A number that is not finite is written as null: JSON has no other word for it."""
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def truncate_after(self, step: int) -> int:
        """Drop the lines after `step`, the checkpoint's, and a line that a kill cut. Returns how many."""
        if not self.path.is_file():
            return 0
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        kept = [line for line in lines if (row := _row(line)) is not None and row.get("step", 0) <= step]
        with replacing(self.path) as file:
            file.writelines(line + "\n" for line in kept)
        return len(lines) - len(kept)

    def rows(self) -> list[dict[str, Any]]:
        """The steps written so far, oldest first; lines that cannot be read are left out."""
        if not self.path.is_file():
            return []
        rows = (_row(line) for line in self.path.read_text(encoding="utf-8").splitlines())
        return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int | float) else None
