"""The progress of a rollout phase while it runs: asks the workers now and then, and shows the answer."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TextIO

from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.progress import EngineLoad, PhaseProgress, Progress
from rstar2_megatron.services.metrics_server import MetricsServer

_POLL_S = 2.0  # between two questions
_LOOK_S = 0.2  # between two looks for the answer
_LINE_S = 60.0  # between lines where the output is no terminal

ShowProgress = Callable[[Progress], None]


class Question(Protocol):
    """A call in flight on all workers (`PendingCall`)."""

    def result_if_ended(self) -> list[EngineLoad | None] | None: ...


class LiveView:
    """Of one phase. `poll` is called often and never waits. `ask` starts a question for the loads of all engines."""

    def __init__(self, ask: Callable[[], Question], phase: RolloutPhase, progress: PhaseProgress, show: ShowProgress) -> None:
        self._ask, self._phase, self._progress, self._show = ask, phase, progress, show
        self._line = StatusLine(sys.stderr)
        self._question: Question | None = None
        self._shown: Progress | None = None
        self._next = time.monotonic() + _POLL_S

    def poll(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        if self._question is None:
            self._question = self._ask()
            return
        try:
            answers = self._question.result_if_ended()
        except RuntimeError:  # a worker failed: the phase sees the same and reports it
            answers = []
        if answers is None:
            return
        self._question, self._next = None, now + _POLL_S
        loads = [load for load in answers if load is not None]
        if loads:
            done, still_open = self._phase.num_closed, self._phase.num_open
            progress = self._progress.at(now, done, done + still_open, self._phase.queue.left, loads)
            self._line.show(str(progress), now)
            self._show(progress)
            self._shown = progress

    def close(self) -> None:
        """The phase has ended: nothing runs any more."""
        self._line.clear()
        if self._shown is not None:
            idle = [replace(load, running=[], waiting=0, tool_calls=0, kv_used_tokens=0) for load in self._shown.loads]
            self._show(replace(self._shown, tokens_per_second=0.0, seconds_left=0.0, loads=idle))


def export_progress(server: MetricsServer, progress: Progress) -> None:
    """Give the progress to Prometheus."""
    server.set("rstar2_rollout_groups", progress.groups)
    server.set("rstar2_rollout_groups_done", progress.groups_done)
    server.set("rstar2_rollout_tokens", progress.tokens)
    server.set("rstar2_rollout_tokens_per_second", progress.tokens_per_second)
    if progress.seconds_left is not None:
        server.set("rstar2_rollout_seconds_left", progress.seconds_left)
    for load in progress.loads:
        engine = str(load.engine)
        server.set("rstar2_trajectories_running", len(load.running), engine=engine)
        server.set("rstar2_trajectories_waiting", load.waiting, engine=engine)
        server.set("rstar2_tool_calls_in_flight", load.tool_calls, engine=engine)
        server.set("rstar2_kv_used_tokens", load.kv_used_tokens, engine=engine)
        server.set("rstar2_kv_capacity_tokens", load.kv_capacity_tokens, engine=engine)


class StatusLine:
    """One line that is rewritten on a terminal, or an occasional line of a log file."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = ""
        self._written = time.monotonic()

    def show(self, text: str, now: float) -> None:
        if self._out.isatty():
            text = text[: shutil.get_terminal_size().columns - 1]
            self._out.write(f"\r{text:<{len(self._shown)}}")
            self._shown = text
        elif now - self._written >= _LINE_S:
            self._written = now
            self._out.write(f"{text}\n")
        self._out.flush()

    def clear(self) -> None:
        if self._shown:
            self._out.write(f"\r{'':<{len(self._shown)}}\r")
            self._out.flush()
            self._shown = ""
