"""One engine process: start it, call it, detect its loss, end it.

A restart makes a new `EngineChild`. An engine is lost when its process ended, when it has not reported for
`rollout.no_progress_timeout_s`, or when calls are waiting and it has produced nothing for that time. Every waiting call
then raises `EngineLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec

from rstar2_megatron.rollout.engine import shared_files
from rstar2_megatron.rollout.engine.arguments import child_environment
from rstar2_megatron.rollout.engine.protocol import (
    REPORT_ID,
    EngineError,
    EngineLost,
    EngineReport,
    GenerationTimeout,
    read_message,
    write_message,
)
from rstar2_megatron.services.process import kill_tree
from rstar2_megatron.settings.schema import RolloutSettings

CONTROL_TIMEOUT_S = 120.0
_LOG_TAIL_CHARS = 4000
_KILL_WAIT_S = 5.0
_LONGEST_CHECK_S = 1.0


class EngineChild:
    """The process that runs `process.py`, and the socket to it. All methods belong to one event loop."""

    def __init__(self, settings: RolloutSettings, arguments: dict[str, Any], *, name: str, log_path: Path | None) -> None:
        self.settings = settings
        self.name = name
        self.report = EngineReport(progress=0.0)
        self.lost_reason = ""
        self.on_report: Callable[[EngineReport], None] = lambda report: None
        self._arguments = arguments
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._log: IO[bytes] = open(log_path, "ab") if log_path else tempfile.TemporaryFile()  # noqa: SIM115
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._progress_seen = self._report_seen = time.monotonic()

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineLost with the end of the process's log."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rstar2_megatron.rollout.engine.process",
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=child_environment(self.settings, dict(os.environ), scores=self._arguments.get("is_embedding", False)),
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child
            )
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._watch())]
        write_message(self._writer, [0, "start", {"server_args": self._arguments}])
        limit = self.settings.engine_start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._ready.wait()
        except TimeoutError:
            self.lose(f"did not start within {limit:.0f} s")
        except asyncio.CancelledError:
            await self.end()
            raise
        if self.lost_reason:
            raise EngineLost(self.lost_message())

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EngineLost(self.lost_message())
        return self._process.pid

    @property
    def num_waiting(self) -> int:
        return len(self._pending)

    # ------------------------------------------------------------------------------------------ calls

    async def call(self, method: str, params: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """Result of `method`. Raises EngineLost, GenerationTimeout after `timeout_s`, EngineError when refused."""
        if self.lost_reason:
            raise EngineLost(self.lost_message())
        if not self._ready.is_set():
            raise EngineError(f"{self.name} is still starting: {method} was called too soon")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._pending:
            self._progress_seen = time.monotonic()
        request_id = self.post(method, params, future)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise GenerationTimeout(f"{self.name}: {method} took longer than {timeout_s:.1f} s") from None
        finally:
            self._pending.pop(request_id, None)

    def post(self, method: str, params: Any, future: asyncio.Future[Any] | None = None) -> int:
        """Send a request without waiting. Its answer goes to `future`, if given. Returns the request id."""
        request_id = next(self._ids)
        if future is not None:
            self._pending[request_id] = future
        if self._writer is not None and not self.lost_reason:
            write_message(self._writer, [request_id, method, params])
        return request_id

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                request_id, error, result = await read_message(reader)
                if request_id == REPORT_ID:
                    self._take_report(msgspec.convert(result, EngineReport))
                    continue
                self._progress_seen = time.monotonic()
                future = self._pending.get(request_id)
                if future is None or future.done():
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(EngineError(f"{self.name}: {error}"))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError) as error:
            self.lose(f"its process ended ({type(error).__name__})")

    # ----------------------------------------------------------------------------------------- health

    def _take_report(self, report: EngineReport) -> None:
        self._report_seen = time.monotonic()
        if report.progress != self.report.progress:
            self._progress_seen = self._report_seen
        self.report = report
        self._ready.set()
        self.on_report(report)

    async def _watch(self) -> None:
        """Check reports and progress. They count from the first report: a start has its own deadline."""
        await self._ready.wait()
        while not self.lost_reason:
            limit = self.settings.no_progress_timeout_s
            await asyncio.sleep(min(_LONGEST_CHECK_S, limit / 4))
            now = time.monotonic()
            if now - self._report_seen > limit:
                self.lose(f"its process has not reported for {limit:.0f} s")
            elif self._pending and now - self._progress_seen > limit:
                self.lose(f"no token for {limit:.0f} s with {len(self._pending)} calls waiting")

    def lose(self, reason: str) -> None:
        """Declare the engine lost: kill it and fail every waiting call. Only the first reason is kept."""
        if self.lost_reason:
            return
        self.lost_reason = reason
        self._ready.set()
        if self._process is not None and self._process.returncode is None:
            kill_tree(self._process.pid)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineLost(self.lost_message()))
        self._pending.clear()

    def lost_message(self) -> str:
        message = f"{self.name} is lost: {self.lost_reason}."
        if self.lost_reason != "closed" and (tail := self._log_tail()):
            message += f" End of its log:\n{tail}\n"
        return message

    def _log_tail(self) -> str:
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        with open(f"/proc/self/fd/{self._log.fileno()}", "rb") as file:
            file.seek(max(0, size - _LOG_TAIL_CHARS))
            return file.read().decode(errors="replace").strip()

    # -------------------------------------------------------------------------------------------- end

    async def end(self) -> None:
        """End the process and everything it started. Safe to call twice."""
        self.lose("closed")
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._tasks = []
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            with contextlib.suppress(TimeoutError):  # stuck in the kernel; the signal has been sent
                async with asyncio.timeout(_KILL_WAIT_S):
                    await self._process.wait()
            shared_files.remove(self._process.pid)  # of an engine that ended while it started
        self._log.close()
