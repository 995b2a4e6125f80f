"""A pass over many rows that continues where it was killed.

Accepted rows are appended to `{out}/.partial.jsonl`; every `SAVE_ROWS` rows the position in the sources, the
counters and the length of that file are written to `{out}/.progress.json` by one rename. After a kill the file is
truncated to the length that belongs to the position. A pass with another configuration starts from the first row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from rstar2_megatron.data.rows import Absent, DataError, Input, Row, Source, Unusable
from rstar2_megatron.records.whole_file import write_json, write_jsonl

SAVE_ROWS = 5000


class ResumablePass:
    """Position, counters and accepted rows of a pass under `out`."""

    def __init__(self, out: Path, configuration: Mapping[str, Any]) -> None:
        """configuration: everything that decides the result; a pass with another one is not continued."""
        self.out = out
        self.partial = out / ".partial.jsonl"
        self._state_path = out / ".progress.json"
        self._configuration = json.loads(json.dumps(configuration))
        self._made_out = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        state = self._load()
        self.resumed = bool(state)
        self.source: int = state.get("source", 0)
        """Index of the current source."""
        self.row: int = state.get("row", 0)
        """Rows of the current source that are done."""
        self.counters: dict[str, Any] = state.get("counters", {})
        self._file = self.partial.open("a", encoding="utf-8")
        self._file.truncate(state.get("bytes", 0))

    def _load(self) -> dict[str, Any]:
        if not self._state_path.is_file() or not self.partial.is_file():
            return {}
        state = json.loads(self._state_path.read_text())
        fits = state["configuration"] == self._configuration and self.partial.stat().st_size >= state["bytes"]
        return state if fits else {}

    def keep(
        self,
        inputs: Sequence[Input],
        sources: Mapping[str, Source],
        limit: int | None,
        counts_of: Callable[[Input], dict[str, Any]],
        make: Callable[[str, Row], Mapping[str, Any]],
    ) -> None:
        """Accept what make(name of the source, row) returns for each remaining row, at most `limit` of each input.

        A row for which it raises Unusable is dropped and counted, with the place of the first one that is dropped for its
        reason. Raises DataError when the first row is of another shape.
        """
        for source in inputs[self.source :]:
            counts = counts_of(source)
            rows = source.rows(sources[source.name].columns, self.row)
            rest = islice(rows, None if limit is None else max(0, limit - self.row))
            for row in tqdm(rest, source.label[-40:], limit, initial=self.row, unit="row", disable=None):
                counts["in"] = counts.get("in", 0) + 1
                try:
                    self._file.write(json.dumps(make(source.name, row), ensure_ascii=False) + "\n")
                except (DataError, Unusable) as error:
                    if isinstance(error, DataError) and not self.row:
                        raise
                    why = str(error) if isinstance(error, Unusable) else "without a column that the first row has"
                    dropped = counts.setdefault("dropped", {})
                    dropped[why] = dropped.get(why, 0) + 1
                    counts.setdefault("first_dropped", {}).setdefault(why, row.where)
                self.row += 1
                if self.row % SAVE_ROWS == 0:
                    self.save()
            self.source, self.row = self.source + 1, 0
            self.save()

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
        """Keep the position of a pass that may be continued; of one that ended with its input refused nothing is left."""
        self._file.close()
        refused = failure is not None and issubclass(failure, DataError) and not issubclass(failure, Absent)
        if failure is None or refused or not self._state_path.is_file():
            self._state_path.unlink(missing_ok=True)
            self.partial.unlink(missing_ok=True)
            if failure is not None and self._made_out:
                self.out.rmdir()

    def write_results(
        self, train: Iterable[Mapping[str, Any]], validation: Iterable[Mapping[str, Any]] | None, report: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write train.jsonl, validation.jsonl unless None, and report.json, which it returns."""
        written = {"train.jsonl": write_jsonl(self.out / "train.jsonl", train)}
        if validation is None:  # of an earlier pass, it would hold problems that are trained on now
            (self.out / "validation.jsonl").unlink(missing_ok=True)
        else:
            written["validation.jsonl"] = write_jsonl(self.out / "validation.jsonl", validation)
        result = {"rows_out": sum(written.values()), "written": written, **report}
        write_json(self.out / "report.json", result)
        return result
