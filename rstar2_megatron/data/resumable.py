"""A pass over many rows that continues where it was killed.

Accepted rows are appended to `{out}/.partial.jsonl`; every `SAVE_ROWS` rows the position in the sources, the
counters and the length of that file are written to `{out}/.progress.json` by one rename. After a kill the file is
truncated to the length that belongs to the position. A pass with another configuration starts from the first row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from rstar2_megatron.data.rows import DataError, Input, Row, Source, Unusable
from rstar2_megatron.records.whole_file import write_json, write_jsonl

SAVE_ROWS = 5000


def count_dropped(counts: dict[str, Any], why: str, where: str) -> None:
    """Count a dropped row of a source, and keep the place of the first one that was dropped for this reason."""
    dropped = counts.setdefault("dropped", {})
    dropped[why] = dropped.get(why, 0) + 1
    counts.setdefault("first_dropped", {}).setdefault(why, where)


class ResumablePass:
    """Position, counters and accepted rows of a pass under `out`."""

    def __init__(self, out: Path, configuration: Mapping[str, Any], save_rows: int = SAVE_ROWS) -> None:
        """configuration: everything that decides the result; a pass with another one is not continued."""
        self.out = out
        self.partial = out / ".partial.jsonl"
        self._state_path = out / ".progress.json"
        self._configuration = json.loads(json.dumps(configuration))
        self._save_rows = save_rows
        self.source = 0
        """Index of the current source."""
        self.row = 0
        """Rows of the current source that are done."""
        self.counters: dict[str, Any] = {}
        self.resumed = False
        out.mkdir(parents=True, exist_ok=True)
        state = self._load()
        if state is not None:
            self.source, self.row, self.counters = state["source"], state["row"], state["counters"]
            self.resumed = True
        length = state["bytes"] if state else 0
        with self.partial.open("ab") as file:
            file.truncate(length)
        self._file = self.partial.open("a", encoding="utf-8")

    def _load(self) -> dict[str, Any] | None:
        if not self._state_path.is_file() or not self.partial.is_file():
            return None
        state = json.loads(self._state_path.read_text())
        fits = state["configuration"] == self._configuration and self.partial.stat().st_size >= state["bytes"]
        return state if fits else None

    def accept(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def rows(
        self, inputs: Sequence[Input], columns: Mapping[str, Sequence[str]], limit: int | None
    ) -> Iterator[tuple[Input, Row]]:
        """The remaining rows, at most `limit` of each input, with a progress bar. A row is done when the next is taken.

        columns: the columns to read of each source. Raises DataError.
        """
        while self.source < len(inputs):
            source = inputs[self.source]
            total = source.count()
            if limit is not None:
                total = limit if total is None else min(total, limit)
            with tqdm(total=total, initial=self.row, desc=source.label[-40:], unit="row", disable=None) as bar:
                for row in source.rows(columns[source.name], self.row):
                    if limit is not None and self.row >= limit:
                        break
                    yield source, row
                    self.row += 1
                    if self.row % self._save_rows == 0:
                        self.save()
                    bar.update()
            self.source, self.row = self.source + 1, 0
            self.save()

    def keep(
        self,
        inputs: Sequence[Input],
        sources: Mapping[str, Source],
        limit: int | None,
        counts_of: Callable[[Input], dict[str, Any]],
        make: Callable[[str, Row], Mapping[str, Any] | None],
    ) -> None:
        """Accept what make(name of the source, row) returns for each remaining row, at most `limit` of each input.

        A row for which it raises Unusable is dropped and counted. Raises DataError when the first row is of another shape.
        """
        columns = {name: source.columns for name, source in sources.items()}
        for source, row in self.rows(inputs, columns, limit):
            counts = counts_of(source)
            counts["in"] = counts.get("in", 0) + 1
            try:
                kept = make(source.name, row)
            except DataError:
                if not self.row:
                    raise
                count_dropped(counts, "without a column that the first row has", row.where)
            except Unusable as why:
                count_dropped(counts, str(why), row.where)
            else:
                if kept is not None:
                    self.accept(kept)

    def save(self) -> None:
        """Put everything so far on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        write_json(
            self._state_path,
            {
                "configuration": self._configuration,
                "source": self.source,
                "row": self.row,
                "counters": self.counters,
                "bytes": self.partial.stat().st_size,
            },
        )

    def accepted(self) -> Iterator[dict[str, Any]]:
        """The rows kept so far."""
        self._file.flush()
        with self.partial.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Remove the position when the results are written; keep it after a failure."""
        self._file.close()
        if failure is None:
            self._state_path.unlink(missing_ok=True)
            self.partial.unlink(missing_ok=True)

    def write_results(
        self, train: Iterable[Mapping[str, Any]], validation: Iterable[Mapping[str, Any]] | None, report: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write train.jsonl, validation.jsonl unless None, and report.json, which it returns."""
        written = {"train.jsonl": write_jsonl(self.out / "train.jsonl", train)}
        if validation is not None:
            written["validation.jsonl"] = write_jsonl(self.out / "validation.jsonl", validation)
        result = {"rows_out": sum(written.values()), "written": written, **report}
        write_json(self.out / "report.json", result)
        return result
