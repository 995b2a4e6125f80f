"""Reads training curves of any of the codes that people compare: ours, RLinf's, verl's, wandb's exports.

A log is read as far as it can be: every file gives a `Log` with what was found and a message for what was
not.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rstar2_megatron.report.names import ours_from_verl
from rstar2_megatron.report.wandb_file import BrokenFile, read_history

Series = dict[int, float]  # step -> value

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONSOLE = re.compile(r"step:\s*(\d+)\s+-\s+(.*)")
_EVENT_FILE = "events.out.tfevents"


@dataclass
class Log:
    """One run's curves under our names. `first_step` is the number of its first training step."""

    path: Path
    kind: str
    series: dict[str, Series] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    first_step: int = 1

    @property
    def label(self) -> str:
        name = self.path.resolve().name
        if name in ("metrics.jsonl", "tensorboard", "all") or name.startswith(_EVENT_FILE):
            return self.path.resolve().parent.name
        return name

    def add(self, name: str, step: int, value: float) -> None:
        if math.isfinite(value):
            self.series.setdefault(name, {})[step] = value

    def aligned(self, name: str) -> Series:
        """A curve with steps counted from 1, whatever the code counts from."""
        shift = 1 - self.first_step
        return {step + shift: value for step, value in sorted(self.series.get(name, {}).items())}


def read_log(path: str | Path, *, verl: bool = False) -> Log:
    """Curves of a run directory or a log file; `verl` translates verl's names.

    Understands metrics.jsonl, TensorBoard event directories, verl's `file` jsonl, verl's console output,
    wandb's offline runs (`.wandb`) and its exports as CSV or jsonl. Never raises for what is in the files; an
    unreadable log has no series and says why.
    """
    path = Path(path)
    log = Log(path, "verl" if verl else "ours")
    if not path.exists():
        log.messages.append(f"{path} does not exist")
        return log
    try:
        _read_into(log, path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        log.messages.append(f"{path}: {error}")
    if verl or any(name.startswith(("critic/", "timing_s/")) for name in log.series):
        log.kind = "verl"
        log.series = _renamed(log.series)
    if not log.series:
        log.messages.append(f"{path}: no training curves found")
    else:
        _find_numbering(log)
    return log


def _find_numbering(log: Log) -> None:
    """RLinf counts from 0 and, with several mini-batches a step, in optimizer steps: bring it to one a step."""
    training = [series for name, series in log.series.items() if not name.startswith(("eval/", "val"))]
    steps = {step for series in training for step in series}
    log.first_step = 0 if 0 in steps else 1
    stride = math.gcd(*steps) if log.first_step == 0 and len(steps) > 2 else 1
    if stride > 1:
        log.series = {
            name: {step // stride: value for step, value in series.items()}
            for name, series in log.series.items()
        }
        log.messages.append(f"{log.path}: steps are multiples of {stride}; read as one training step each")


def _read_into(log: Log, path: Path) -> None:
    if path.is_dir():
        metrics = path / "metrics.jsonl"
        if metrics.is_file():
            _read_jsonl(log, metrics)
            return
        events = sorted(path.rglob(f"{_EVENT_FILE}*"))
        if events:
            _read_tensorboard(log, events)
            return
        offline = sorted(path.rglob("*.wandb"))
        if offline:
            for file in offline:
                _read_wandb(log, file)
            return
        for file in sorted(path.rglob("*")):
            if file.suffix in (".jsonl", ".csv", ".log", ".txt") and file.is_file():
                _read_into(log, file)
        return
    if _EVENT_FILE in path.name:
        _read_tensorboard(log, [path])
        return
    readers: dict[str, Callable[[Log, Path], None]] = {
        ".jsonl": _read_jsonl,
        ".csv": _read_csv,
        ".wandb": _read_wandb,
    }
    readers.get(path.suffix, _read_console)(log, path)


def _read_jsonl(log: Log, path: Path) -> None:
    """Ours `{"step": n, name: value}`, verl's `{"step": n, "data": {...}}`, wandb's `{"_step": n, ...}`."""
    bad: list[int] = []
    for number, row in _json_rows(path):
        step = None if row is None else row.get("step", row.get("_step"))
        if row is None or not isinstance(step, int | float):
            bad.append(number)
            continue
        for name, value in (row["data"] if isinstance(row.get("data"), dict) else row).items():
            if (
                name not in ("step", "_step")
                and isinstance(value, int | float)
                and not isinstance(value, bool)
            ):
                log.add(name, int(step), float(value))
    _report_bad(log, path, bad, "lines")


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            yield number, row if isinstance(row, dict) else None


def _read_csv(log: Log, path: Path) -> None:
    """A wandb export: a step column and a column per metric, perhaps named `run - metric`."""
    bad: list[int] = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.DictReader(file)
        steps = [c for c in rows.fieldnames or [] if c.strip().lower() in ("step", "_step", "global_step")]
        if not steps:
            log.messages.append(f"{path}: no column Step, _step or global_step; columns {rows.fieldnames}")
            return
        for number, row in enumerate(rows, 2):
            try:
                step = int(float(row[steps[0]]))
            except (TypeError, ValueError):
                bad.append(number)
                continue
            for column, text in row.items():
                if column is None or column in steps or not isinstance(text, str):
                    continue
                name = column.rsplit(" - ", 1)[-1]
                if name.endswith(("__MIN", "__MAX")):
                    continue
                value = _number(text)
                if value is not None:
                    log.add(name, step, value)
    _report_bad(log, path, bad, "rows")


def _read_wandb(log: Log, path: Path) -> None:
    rows = 0
    try:
        for step, values in read_history(path):
            rows += 1
            for name, value in values.items():
                if (
                    not name.startswith("_")
                    and isinstance(value, int | float)
                    and not isinstance(value, bool)
                ):
                    log.add(name, step, float(value))
    except BrokenFile as error:
        log.messages.append(f"{path}: read up to a break, {rows} rows ({error})")


def _read_console(log: Log, path: Path) -> None:
    """verl's console: `step:N - key:value - key:value`, with colour codes and a process prefix before it."""
    found = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _CONSOLE.search(_COLOUR.sub("", line))
            if not match:
                continue
            found += 1
            for pair in re.split(r"\s-\s(?=[\w@/.\-]+:)", match.group(2).strip()):
                name, colon, text = pair.rpartition(":")
                value = _number(text) if colon else None
                if value is not None:
                    log.add(name.strip(), int(match.group(1)), value)
    if not found:
        log.messages.append(f"{path}: no lines of the form `step:N - key:value - ...`")


def _read_tensorboard(log: Log, files: list[Path]) -> None:
    """Scalars of event files, oldest file first, so that a resumed run's steps replace the lost ones."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for path in files:
        if not path.stat().st_size:
            log.messages.append(f"{path}: empty")
            continue
        events = 0
        try:
            for event in LegacyEventFileLoader(str(path)).Load():
                events += 1
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        log.add(value.tag, event.step, value.simple_value)
                    elif value.HasField("tensor") and value.tensor.dtype in (1, 2):
                        array = make_ndarray(value.tensor)
                        if array.size == 1:
                            log.add(value.tag, event.step, float(array.reshape(-1)[0]))
        except (
            Exception
        ) as error:  # what a broken record throws is not foreseeable; what came before it counts
            log.messages.append(f"{path}: {type(error).__name__} after {events} records")
            continue
        if not _holds_records(path, events):  # the loader ends silently at a bad checksum
            log.messages.append(f"{path}: read up to a broken record, {events} records")


def _holds_records(path: Path, count: int) -> bool:
    """True when the file is exactly `count` records: length u64, checksum, data, checksum, each."""
    size, offset = path.stat().st_size, 0
    with path.open("rb") as file:
        for _ in range(count):
            file.seek(offset)
            offset += int.from_bytes(file.read(8), "little") + 16
    return offset == size


def _number(text: str) -> float | None:
    """0.41 of "0.41", "np.float64(0.41)", "tensor(0.41)"."""
    match = re.fullmatch(
        r"\s*(?:[\w.]+\(\s*)?([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?:,.*)?\)?\s*", text
    )
    return float(match.group(1)) if match else None


def _renamed(series: dict[str, Series]) -> dict[str, Series]:
    """verl's curves under our names; where two of its names mean one quantity the first found counts."""
    renamed: dict[str, Series] = defaultdict(dict)
    for name, values in series.items():
        ours = ours_from_verl(name)
        renamed[ours] = {**values, **renamed[ours]}
    return dict(renamed)


def _report_bad(log: Log, path: Path, bad: list[int], what: str) -> None:
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        log.messages.append(f"{path}: {len(bad)} {what} could not be read ({shown})")
