"""Events of one traced step (`runner.trace`) in the array form of Chrome's trace format, which Perfetto opens.

Every process of the run appends whole lines to the same file; the form allows the end of the array to be missing, so a
killed run leaves what it wrote. Times are microseconds since `origin`, the driver's wall clock at the start of the step.
Hooks call `TRACE`, which does nothing until `open`. Rows of the picture are Chrome's processes, lanes are its threads.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
Event = dict[str, Any]
Args = dict[str, Any]

_FLUSH_S = 0.5
_LANES = 1000  # of one process in a row that several processes share
_lane: ContextVar[int] = ContextVar("lane", default=0)


class TraceRow(NamedTuple):
    """A row of the picture. `pid` orders the rows; `shared`: several processes write to it."""

    pid: int
    name: str
    shared: bool = False


DRIVER = TraceRow(1, "driver")
SYNC = TraceRow(2, "weight sync")
CHECKPOINT = TraceRow(3, "checkpoint")
GRADING = TraceRow(4, "grading", shared=True)
TOOLS = TraceRow(5, "tool calls", shared=True)
_FIRST_ENGINE, _FIRST_ACTOR = 100, 10_000


def engine_row(rank: int) -> TraceRow:
    return TraceRow(_FIRST_ENGINE + rank, f"engine {rank}")


def actor_row(rank: int) -> TraceRow:
    return TraceRow(_FIRST_ACTOR + rank, f"actor rank {rank}")


def engine_of(pid: int) -> int | None:
    """The engine whose row has this pid, or None."""
    return pid - _FIRST_ENGINE if _FIRST_ENGINE <= pid < _FIRST_ACTOR else None


def actor_of(pid: int) -> int | None:
    """The actor rank whose row has this pid, or None."""
    return pid - _FIRST_ACTOR if pid >= _FIRST_ACTOR else None


def trace_path(run: str | Path, step: int) -> Path:
    return Path(run) / "traces" / f"step_{step}.json"


def clock_offset(pings: Sequence[tuple[float, float, float]]) -> float:
    """Seconds by which another clock is ahead of ours, from (sent, the other's answer, received) of each ping.

    The quickest ping has the smallest error, at most half its round trip.
    """
    sent, theirs, received = min(pings, key=lambda ping: ping[2] - ping[0])
    return theirs - (sent + received) / 2


class Recorder:
    """The events of one process. Its methods cost a comparison while no trace is open."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._lines: list[str] = []
        self._row = DRIVER
        self._index = 0
        self._zero = 0.0  # of the step, on this process's monotonic clock
        self._flushed = 0.0
        self._free: dict[int, list[int]] = {}  # by pid: lanes that are free again
        self._named: set[tuple[int, int]] = set()

    def open(self, path: Path, origin: float, row: TraceRow = DRIVER, *, index: int = 0, offset_s: float = 0.0) -> None:
        """Record into `path` until `close`; the driver opens it first. `row`: of this process, its rank is `index`.

        origin: wall clock of the driver in seconds; offset_s: by which this process's wall clock is ahead of it.
        """
        self.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, mode | (os.O_TRUNC if row is DRIVER else 0), 0o644)
        self._row, self._index = row, index
        self._zero = origin + offset_s - time.time() + time.monotonic()
        self._free, self._named = {}, set()
        if row is DRIVER:
            self._write("[\n")
            self._add({"name": "origin", "ph": "M", "pid": row.pid, "args": {"wall_clock_s": origin}})
        self._lane_name(row, 0)
        self.flush()

    def close(self) -> None:
        """Write what is buffered. The driver, which closes last, also ends the array."""
        if self._file is None:
            return
        self.flush()
        if self._row is DRIVER:
            self._write('{"name": "end", "ph": "M", "pid": 1, "args": {}}\n]\n')
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def on(self) -> bool:
        return self._file is not None

    def span(self, name: str, row: TraceRow | None = None, **args: Any) -> AbstractContextManager[Args]:
        """A span from entering to leaving; entering gives its arguments, which may be changed until then.

        It is drawn in this process's row, within the `task` around it if there is one. In another `row` it gets a free lane.
        """
        return nullcontext({}) if self._file is None else self._span(name, row, args)

    def task(self, name: str, **args: Any) -> AbstractContextManager[Args]:
        """A span on a free lane of this process's row; spans of the same asyncio task are drawn within it.

        Its beginning is an event of its own, so that a killed run shows it.
        """
        return nullcontext({}) if self._file is None else self._task(name, args)

    def add(self, name: str, start: float, end: float, row: TraceRow | None = None, **args: Any) -> None:
        """A span between two times of `time.monotonic()`. Spans of a lane may touch or hold each other, not overlap."""
        if self._file is not None:
            self._complete(row or self._row, 0, name, start, end, args)

    def counter(self, name: str, **values: float) -> None:
        """Values at this time, drawn as a curve in this process's row."""
        if self._file is not None:
            self._add({"name": name, "ph": "C", "pid": self._row.pid, "ts": self._now(), "args": values})

    @contextmanager
    def _span(self, name: str, row: TraceRow | None, args: Args) -> Iterator[Args]:
        lane = _lane.get() if row is None else self._take_lane(row)
        start = time.monotonic()
        try:
            yield args
        finally:
            self._complete(row or self._row, lane, name, start, time.monotonic(), args)
            if row is not None:
                self._release_lane(row, lane)

    @contextmanager
    def _task(self, name: str, args: Args) -> Iterator[Args]:
        lane = self._take_lane(self._row)
        outer = _lane.set(lane)
        where = {"pid": self._row.pid, "tid": self._tid(self._row, lane)}
        self._add({"name": name, "ph": "B", "ts": self._now(), **where, "args": dict(args)})
        try:
            yield args
        finally:
            self._add({"ph": "E", "ts": self._now(), **where, "args": args})
            _lane.reset(outer)
            self._release_lane(self._row, lane)

    def _complete(self, row: TraceRow, lane: int, name: str, start: float, end: float, args: Args) -> None:
        self._lane_name(row, lane)
        begun, where = self._at(start), {"pid": row.pid, "tid": self._tid(row, lane)}
        self._add({"name": name, "ph": "X", "ts": begun, "dur": self._at(end) - begun, **where, "args": args})

    def _now(self) -> int:
        return self._at(time.monotonic())

    def _at(self, monotonic: float) -> int:
        """Microseconds since the start of the step."""
        return round((monotonic - self._zero) * 1e6)

    # ------------------------------------------------------------------------------------------- lanes

    def _tid(self, row: TraceRow, lane: int) -> int:
        return self._index * _LANES + lane if row.shared else lane

    def _take_lane(self, row: TraceRow) -> int:
        free = self._free.setdefault(row.pid, [1])
        lane = heapq.heappop(free)
        if not free:
            free.append(lane + 1)
        self._lane_name(row, lane)
        return lane

    def _release_lane(self, row: TraceRow, lane: int) -> None:
        heapq.heappush(self._free.setdefault(row.pid, [1]), lane)

    def _lane_name(self, row: TraceRow, lane: int) -> None:
        if (row.pid, lane) in self._named:
            return
        if not any(pid == row.pid for pid, _ in self._named):
            self._add({"name": "process_name", "ph": "M", "pid": row.pid, "args": {"name": row.name}})
            self._add({"name": "process_sort_index", "ph": "M", "pid": row.pid, "args": {"sort_index": row.pid}})
        self._named.add((row.pid, lane))
        name = f"lane {lane}" if lane else row.name
        owner = f"worker {self._index}" if row == self._row else self._row.name
        label = f"{owner}, {name}" if row.shared else name
        tid = self._tid(row, lane)
        self._add({"name": "thread_name", "ph": "M", "pid": row.pid, "tid": tid, "args": {"name": label}})

    # ------------------------------------------------------------------------------------------- file

    def _add(self, event: Event) -> None:
        if self._file is None:  # the trace ended within a span
            return
        self._lines.append(json.dumps(event) + ",\n")
        if time.monotonic() - self._flushed > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._flushed = time.monotonic()
        self._write("".join(lines))

    def _write(self, text: str) -> None:
        """Append whole lines; the lock keeps those of several nodes apart on a network file system."""
        if self._file is None or not text:
            return
        data = memoryview(text.encode())
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        except OSError as error:  # a trace that cannot be written must not end the run
            logger.warning("the trace of this step ends here: %s", error)
            os.close(self._file)
            self._file = None


TRACE = Recorder()
"""The recorder of this process."""


def read_trace(path: str | Path) -> list[Event]:
    """The events of a file, also of one that a kill cut short. Raises ValueError when it holds none."""
    events = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line.strip().rstrip(","))
            except json.JSONDecodeError:  # the bracket lines, and a line that a kill tore
                continue
            if isinstance(event, dict) and "ph" in event:
                events.append(event)
    if not events:
        raise ValueError(f"{path} holds no trace events; runner.trace=N writes RUN/traces/step_N.json")
    return events
