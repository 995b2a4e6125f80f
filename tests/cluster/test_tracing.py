"""Clocks of workers on other machines, which cannot be had here: a group whose second worker has another kernel and clock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.cluster.tracing import StepTraces, TracedWorker, traced
from rstar2_megatron.records.trace import TRACE, TraceRow, engine_row, read_trace, trace_path


class Here(TracedWorker):
    _rank = 0

    def trace_row(self) -> TraceRow:
        return engine_row(0)


class Group:
    """Rank 0 of this machine, rank 1 of one whose clock is an hour ahead."""

    offsets: tuple[float, ...] = ()

    def __len__(self) -> int:
        return 2

    def call(self, method: str, *args: Any, timeout_s: float, ranks: Iterable[int] = (0, 1)) -> list[Any]:
        if method == "begin_trace":
            self.offsets = tuple(args[2])
        if method != "trace_clock":
            return [None, None]
        return [Here().trace_clock() if rank == 0 else ("another kernel", time.time() + 3600) for rank in ranks]

    def start(self, method: str) -> Any:
        return SimpleNamespace(ranks=[0, 1], result=lambda timeout_s: self.call(method, timeout_s=timeout_s))


def test_workers_elsewhere_get_the_offset_of_their_clock(tmp_path: Path) -> None:
    group = Group()
    traces = StepTraces(tmp_path, [3], [cast(WorkerGroup, group)])
    with traces.step(2):
        assert not TRACE.on
    with traces.step(3):
        assert TRACE.on
    assert not TRACE.on and not trace_path(tmp_path, 2).exists()
    assert group.offsets == (0.0, pytest.approx(3600, abs=0.1))
    assert [e["name"] for e in read_trace(trace_path(tmp_path, 3)) if e["ph"] == "X"] == ["step 3"]


def test_a_step_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="lost"), StepTraces(tmp_path, [1], [cast(WorkerGroup, Group())]).step(1):
        raise RuntimeError("lost")
    assert not TRACE.on and read_trace(trace_path(tmp_path, 1))[-1]["name"] == "end"


async def test_traced_methods_are_spans_of_their_worker(tmp_path: Path) -> None:
    class Worker(Here):
        @traced
        def plain(self) -> int:
            return 1

        @traced
        async def asynchronous(self) -> int:
            return 2

    worker, path = Worker(), tmp_path / "step_1.json"
    assert worker.plain() == 1  # without a trace
    worker.begin_trace(str(path), time.time(), [0.0])
    assert (worker.plain(), await worker.asynchronous()) == (1, 2)
    worker.end_trace()
    spans = [(e["pid"], e["name"]) for e in read_trace(path) if e["ph"] == "X"]
    assert spans == [(engine_row(0).pid, "plain"), (engine_row(0).pid, "asynchronous")]
