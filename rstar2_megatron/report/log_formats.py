"""Readers of training logs: jsonl, TensorBoard, wandb, verl's console.

Each reader fills a `Log` with curves under the names of the file, and with messages about lines that it could not read.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rstar2_megatron.report.number_text import cell_number, decimal_mark, is_like_a_number, number
from rstar2_megatron.report.wandb_file import BrokenFile, read_history

Series = dict[int, float]  # step -> value
Table = tuple[str, list[list[str]]]

EVENT_FILE = "events.out.tfevents"
TABLES = (".csv", ".tsv")
LOG_SUFFIXES = (".jsonl", *TABLES, ".log", ".txt", ".wandb")
_STEPS = ("global_step", "step", "_step")
"""Names of a step, that of training first: of several the first counts, because wandb's own counts calls of its log."""
_MOST_STEPS = 2**53
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONSOLE = re.compile(r"\bstep:\s*(\d+)\s+-\s+(.*)")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")  # Ray's, behind a line


@dataclass
class Log:
    """One run's curves under our names. `first_step` is the number of its first training step."""

    path: Path
    kind: str
    series: dict[str, Series] = field(default_factory=dict)
    not_finite: dict[str, set[int]] = field(default_factory=dict)
    """Steps of each curve whose value is NaN or infinite; `series` has no point there."""
    repeated: set[int] = field(default_factory=set)
    """Steps that are logged more than once with different values; the last counts."""
    unread: list[str] = field(default_factory=list)
    """What looks like a number and cannot be read as one, with its step."""
    settings: dict[str, Any] | None = None
    """The run's saved configuration, where it has one."""
    messages: list[str] = field(default_factory=list)
    first_step: int = 1
    run: str = ""
    """Name of the run in a file that holds several runs."""

    @property
    def label(self) -> str:
        if self.run:
            return self.run
        path = self.path.resolve()
        while path.name in ("metrics.jsonl", "tensorboard", "all") or path.name.startswith(EVENT_FILE):
            path = path.parent
        return path.stem if path.suffix.lower() in LOG_SUFFIXES else path.name

    def add(self, name: str, step: int, value: float) -> None:
        if not math.isfinite(value):
            self.not_finite.setdefault(name, set()).add(step)
            return
        series = self.series.setdefault(name, {})
        if series.get(step, value) != value:
            self.repeated.add(step)
        series[step] = value

    def add_text(self, name: str, step: int, text: str, value: float | None) -> None:
        """Add the value that was read of a text. None: it has none, which is told of what looks like a number."""
        if value is not None:
            self.add(name, step, value)
        elif is_like_a_number(text):
            self.unread.append(f"{text.strip()!r} at step {step}")

    def aligned(self, name: str) -> Series:
        """A curve with steps counted from 1."""
        shift = 1 - self.first_step
        return {step + shift: value for step, value in sorted(self.series.get(name, {}).items())}


def read_jsonl(log: Log, path: Path) -> None:
    """Ours `{"step": n, name: value}`, verl's `{"step": n, "data": {...}}`, wandb's `{"_step": n, ...}`."""
    bad: list[int] = []
    rows: list[tuple[int, dict[str, Any]]] = []
    with _opened(path) as file:
        for place, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            rows.append((place, row if isinstance(row, dict) else {}))
    key = next((name for name in _STEPS if any(name in row for _, row in rows)), "")
    for place, row in rows:
        step = row.get(key)
        if isinstance(step, int | float) and abs(step) < _MOST_STEPS and float(step).is_integer():
            _add_all(log, int(step), row["data"] if isinstance(row.get("data"), dict) else row)
        else:
            bad.append(place)
    _report_bad(log, path, bad, "lines")


def _add_all(log: Log, step: int, values: Mapping[str, Any]) -> None:
    """Add the numbers among the values, without wandb's own names (`_step`, ...). Our null and wandb's "NaN" are NaN."""
    for name, value in values.items():
        if name in _STEPS or name.startswith("_") or isinstance(value, bool):
            continue
        if value is None or isinstance(value, str):
            text = value or "nan"
            log.add_text(name, step, text, number(text))
        elif isinstance(value, int | float):
            log.add(name, step, float(str(value)))  # of a text: a whole number beyond floats is infinite


def _opened(path: Path, newline: str | None = None) -> IO[str]:
    """UTF-8 with or without a byte-order mark, or UTF-16 with one."""
    with path.open("rb") as file:
        wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    return path.open(encoding="utf-16" if wide else "utf-8-sig", errors="replace", newline=newline)


def read_table(path: Path) -> Table:
    """(delimiter, rows): the delimiter that `sep=` before the names says, else one by which they have a column of steps."""
    with _opened(path, newline="") as file:
        said, rest = re.match(r"(?:sep=(.)\r?\n)?(.*)", file.read(), re.DOTALL).groups()  # type: ignore[union-attr]
    for delimiter in said or "\t;,":
        try:
            rows = [row for row in csv.reader(io.StringIO(rest, newline=""), delimiter=delimiter, skipinitialspace=True) if row]
        except csv.Error as error:
            raise ValueError(f"not a table: {error}; export it again") from None
        if rows and _step_columns(rows[0]):
            break
    return delimiter, rows or [[]]


def csv_runs(table: Table) -> list[str]:
    """The runs of a wandb export, whose columns are named `RUN - metric`; "" where they are not."""
    names = table[1][0]
    steps = _step_columns(names)
    runs = {_split_column(name)[0] for name in names if steps and name not in steps}
    return sorted(runs) or [""]


def _step_columns(names: Sequence[str]) -> list[str]:
    found = [name for name in names if name.strip().lower() in _STEPS]
    return sorted(found, key=lambda name: _STEPS.index(name.strip().lower()))


def _split_column(name: str) -> tuple[str, str]:
    run, _, metric = name.rpartition(" - ")
    return run.removeprefix("Group: "), metric


def read_csv(log: Log, path: Path, table: Table, run: str) -> None:
    """The columns of `run` in a wandb export."""
    delimiter, (names, *rows) = table
    steps = _step_columns(names)
    if not steps:
        log.messages.append(f"{path}: no column Step, _step or global_step; columns {names}")
        return
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        log.messages.append(f"{path}: several columns are named {', '.join(twice)} and are left out; rename them")
    mark = decimal_mark((cell for row in rows for cell in row), delimiter)
    bad: list[int] = []
    for place, row in enumerate(rows, 2):
        fits = len(row) >= len(names) and not any(row[len(names) :])
        step = cell_number(row[names.index(steps[0])], mark) if fits else None
        if step is None or not step.is_integer():
            bad.append(place)
            continue
        for column, text in zip(names, row):
            owner, name = _split_column(column)
            if column in steps or column in twice or owner != run or name.startswith("_") or name.endswith(("__MIN", "__MAX")):
                continue
            log.add_text(name, int(step), text, cell_number(text, mark))
    _report_bad(log, path, bad, "rows")


def read_wandb(log: Log, files: Sequence[Path]) -> None:
    """The history of an offline run, which has several files when it was resumed."""
    for path in files:
        rows = 0
        try:
            for step, values in read_history(path):
                rows += 1
                _add_all(log, step, values)
        except BrokenFile as error:
            log.messages.append(f"{path}: read up to a break, {rows} rows ({error})")


def read_console(log: Log, path: Path) -> None:
    """verl's console: `step:N - key:value - key:value`, with colour codes and a process prefix before it."""
    found = 0
    with _opened(path) as file:
        for place, line in enumerate(file, 1):
            match = _CONSOLE.search(_COLOUR.sub("", line))
            if not match:
                continue
            found += 1
            pairs = re.split(r"\s-\s(?=[\w@/.\-]+:)", _REPEATED.sub("", match.group(2)).strip())
            if not line.endswith("\n"):
                pairs.pop()  # 5 of 512.5 would pass for a value
                log.messages.append(f"{path}: line {place} has no end; its last value is left out")
            for pair in pairs:
                name, colon, text = pair.rpartition(":")
                if number(text) is None:  # tensor(0.5, device='cuda:0')
                    name, colon, text = pair.partition(":")
                if colon:
                    log.add_text(name.strip(), int(match.group(1)), text, number(text))
    if not found:
        log.messages.append(f"{path}: no lines of the form `step:N - key:value - ...`")


def read_tensorboard(log: Log, files: Sequence[Path]) -> None:
    """Scalars of event files, oldest file first, so that a resumed run's steps replace the lost ones."""
    # Here: tensorboard takes a second, which other formats do not need.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    from tensorboard.util.tensor_util import make_ndarray

    for path in files:
        if not path.stat().st_size:
            log.messages.append(f"{path}: empty")
            continue
        events, reader = 0, PyRecordReader_New(str(path))
        try:
            while True:
                reader.GetNext()
                event = Event.FromString(reader.record())
                events += 1
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        log.add(value.tag, event.step, value.simple_value)
                    elif value.HasField("tensor") and value.tensor.dtype in (1, 2):
                        array = make_ndarray(value.tensor)
                        if array.size == 1:
                            log.add(value.tag, event.step, float(array.reshape(-1)[0]))
        except OutOfRangeError:  # the end of the file
            pass
        except Exception as error:  # a broken record can raise any error; the records before it are valid
            log.messages.append(f"{path}: read up to a broken record, {events} records ({type(error).__name__})")


def _report_bad(log: Log, path: Path, bad: list[int], what: str) -> None:
    if bad:
        log.messages.append(f"{path}: {len(bad)} {what} could not be read ({some(bad)})")


def some(items: Sequence[object]) -> str:
    """The first five, for a message."""
    return ", ".join(map(str, items[:5])) + (", ..." if len(items) > 5 else "")
