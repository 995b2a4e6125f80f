"""Traces and torch profiles of chosen steps, over the worker groups (`runner.trace`, `runner.profiler`)."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.records.trace import TRACE, TraceRow, clock_offset, trace_path
from rstar2_megatron.settings.schema import ProfilerSettings

_PINGS = 5
_CALL_TIMEOUT_S = 60.0
_WRITE_TIMEOUT_S = 900.0  # the profile of a long step has gigabytes of events


class TracedWorker:
    """Base of the workers that can be traced; a subclass gives its row."""

    _rank: int

    @property
    def number(self) -> int:
        """This worker among those of its kind."""
        return self._rank

    def trace_row(self) -> TraceRow:
        raise NotImplementedError

    def trace_clock(self) -> tuple[str, float]:
        """(identity of this machine's running kernel, wall clock in seconds)."""
        return _kernel(), time.time()

    def begin_trace(self, path: str, origin: float, offsets: Sequence[float]) -> None:
        """Record into `path` (`Recorder.open`). offsets: by number, in seconds."""
        number = self.number
        TRACE.open(Path(path), origin, self.trace_row(), index=number, offset_s=offsets[number])

    def end_trace(self) -> None:
        TRACE.close()


def traced(method: Any) -> Any:
    """A worker's method (plain or async) whose calls are spans of the worker's row."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            with TRACE.span(method.__name__):
                return await method(*args, **kwargs)

        return asynchronous

    @functools.wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with TRACE.span(method.__name__):
            return method(*args, **kwargs)

    return plain


class StepTraces:
    """Traces the steps of `runner.trace` on the driver and on `groups`."""

    def __init__(self, run: Path, steps: Sequence[int], groups: Sequence[WorkerGroup]) -> None:
        self._run, self._steps, self._groups = run.resolve(), frozenset(steps), groups

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around training step `number`."""
        if number not in self._steps:
            yield
            return
        path, origin = trace_path(self._run, number), time.time()
        TRACE.open(path, origin)
        try:
            for group in self._groups:
                offsets = _offsets(group)
                group.call("begin_trace", str(path), origin, offsets, timeout_s=_CALL_TIMEOUT_S)
            with TRACE.span(f"step {number}", step=number):
                yield
            # not after a failure: a worker may be dead, and its events are in the file
            for group in self._groups:
                group.call("end_trace", timeout_s=_CALL_TIMEOUT_S)
        finally:
            TRACE.close()


def _offsets(group: WorkerGroup) -> list[float]:
    """By rank, seconds by which the worker's wall clock is ahead of ours; workers of this machine share it."""
    call = group.start("trace_clock")
    kernels = [kernel for kernel, _ in call.result(_CALL_TIMEOUT_S)]
    offsets = [0.0] * len(group)
    for rank, kernel in zip(call.ranks, kernels, strict=True):
        if kernel != _kernel():
            pings = []
            for _ in range(_PINGS):
                sent = time.time()
                _, theirs = group.call("trace_clock", timeout_s=_CALL_TIMEOUT_S, ranks=[rank])[0]
                pings.append((sent, theirs, time.time()))
            offsets[rank] = clock_offset(pings)
    return offsets


def _kernel() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class StepProfiles:
    """Files: `{output_dir}/step_N/actor_rank_R.json.gz`, and `engine_R-...trace.json.gz` as SGLang names them."""

    def __init__(self, run: Path, settings: ProfilerSettings, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        self._settings, self._groups = settings, (actor, rollout)
        self._directory = Path(settings.output_dir or run / "profiles").resolve()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around training step `number`."""
        if number not in self._settings.steps:
            yield
            return
        directory = str(self._directory / f"step_{number}")
        for group in self._groups:
            group.call("begin_profile", directory, timeout_s=_CALL_TIMEOUT_S)
        yield
        for group in self._groups:
            group.call("end_profile", directory, timeout_s=_WRITE_TIMEOUT_S)
