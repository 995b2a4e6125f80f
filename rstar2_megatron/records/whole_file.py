"""Files that are replaced atomically: a killed writer leaves the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rstar2_megatron.records.disk import writing


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A temporary path; its file replaces `path` at the end of the block, unless the block raises."""
    partial = path.with_name(path.name + ".unfinished")
    with writing(path):
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """As `replacement`, with the temporary file opened for text."""
    with replacement(path) as partial, partial.open("w", encoding="utf-8") as file:
        yield file


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Returns how many rows were written."""
    count = 0
    with replacing(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count
