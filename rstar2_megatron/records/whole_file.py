"""Files that hold their old content or the new one, never a part, whenever the writer is killed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` at the end of the block, unless that raises."""
    partial = path.with_name(path.name + ".unfinished")
    yield partial
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file to write that takes the place of `path` at the end of the block, unless that raises."""
    with replacement(path) as partial, partial.open("w", encoding="utf-8") as file:
        yield file


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Returns how many rows were written."""
    count = 0
    with replacing(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count
