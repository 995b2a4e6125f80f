"""A file of JSON objects, one a line, that survives a kill of its writer and a resume of its run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rstar2_megatron.records.disk import writing
from rstar2_megatron.records.whole_file import replacement, replacing

Row = dict[str, Any]
_STEP = re.compile(rb'\{"step": (\d+)')


class JsonlFile:
    """Rows are appended; a kill leaves at most one torn line at the end, which `drop_torn_line` removes.

    The files of a run (metrics.jsonl, trajectories.jsonl, rollouts.jsonl) have a `step` in each row.
    """

    def __init__(self, path: str | Path, *, sync: bool = True) -> None:
        """sync: `append` returns when the rows are on disk; False: when the operating system has them."""
        self.path = Path(path)
        self._sync = sync

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows. A float of a row that is not finite is written as null, because JSON has no such number."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({k: _finite(v) for k, v in row.items()}, ensure_ascii=False) + "\n")
            file.flush()
            if self._sync:
                os.fsync(file.fileno())

    def drop_torn_line(self) -> None:
        """Remove a last line without a line end."""
        if self.path.is_file():
            with self.path.open("r+b") as file:
                file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after `step`, and lines that are no rows.

        A resumed run calls this with its checkpoint's step, because it writes the later steps again.
        """
        if not self.path.is_file():
            return
        with self._open() as old, replacing(self.path) as new:
            for line in old:
                row = _parse(line)
                if row is not None and _step(row) <= step:
                    new.write(line)

    def keep_newest(self, max_bytes: int) -> None:
        """Drop the oldest steps of a file larger than `max_bytes`, down to half of it. The newest step always stays."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size <= max_bytes:
            return
        cut = position = 0
        previous: bytes | None = None
        with self.path.open("rb") as file:
            for line in file:
                step = _STEP.match(line)
                if step is not None and step[1] != previous:
                    cut, previous = position, step[1]
                    if size - position <= max_bytes // 2:
                        break
                position += len(line)
            if cut:
                file.seek(cut)
                with replacement(self.path) as partial, partial.open("wb") as new:
                    shutil.copyfileobj(file, new)

    def rows(self) -> list[Row]:
        """Rows with a step, oldest first; lines that cannot be read are left out."""
        return [row for _, row in self.numbered_rows() if row is not None and _step(row) < math.inf]

    def numbered_rows(self) -> Iterator[tuple[int, Row | None]]:
        """(line number from 1, row) of each line; None for a line that is no JSON object."""
        if not self.path.is_file():
            return
        with self._open() as file:
            for number, line in enumerate(file, 1):
                yield number, _parse(line)

    def _open(self) -> TextIO:
        """For reading. A kill may have cut the last line inside a character."""
        return self.path.open(encoding="utf-8", errors="replace")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _step(row: Row) -> float:
    """The row's step; infinity when it has none."""
    step = row.get("step")
    return step if isinstance(step, int | float) else math.inf
