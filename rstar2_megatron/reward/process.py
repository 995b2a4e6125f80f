"""Grading processes: each gets requests over a pipe, has a time limit for each reply, and may be killed at any time."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Pipe
from typing import TypeVar

T = TypeVar("T")

START_TIMEOUT_S = 120.0
MEMORY_MB = 2048  # address space; numpy and sympy alone map several hundred MB


class GraderLost(RuntimeError):
    """A grading process could not be started."""


class GradingProcess:
    """`python -m MODULE ARGUMENTS... FILE_DESCRIPTOR`, which sends `ready` when it can work.

    It dies with the thread that started it.
    """

    def __init__(self, module: str, arguments: Sequence[str] = (), *, first: bytes | None = None, quiet: bool = True) -> None:
        """first: a message that it needs to get ready. quiet: what it prints is dropped. Raises GraderLost."""
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        output = subprocess.DEVNULL if quiet else None
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], stdout=output, stderr=output, pass_fds=[theirs.fileno()], env=environment
            )
        if first is not None:
            self.send(first)
        if (reply := self.reply(START_TIMEOUT_S)) != b"ready":
            code = self._process.poll()
            self.kill()
            why = reply.decode() if reply else f"(exit code {code}); run `{' '.join(command)} 1` to see why"
            raise GraderLost(f"a grading process did not start within {START_TIMEOUT_S:.0f} s {why}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def signal(self) -> int:
        """Number of the signal that ended it, 0 while it lives or when it left by itself."""
        return max(-(self._process.poll() or 0), 0)

    def send(self, request: bytes) -> bool:
        """Send a request. False when the process has died."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(request)
            return True
        return False

    def reply(self, timeout_s: float) -> bytes | None:
        """The next reply; None when the time is over or the process has ended."""
        try:
            return self._pipe.recv_bytes() if self._pipe.poll(timeout_s) else None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            return None

    def ask(self, request: bytes, timeout_s: float) -> tuple[bytes | None, bool]:
        """(reply, whether it hung). What hangs or crashes is killed and gives None."""
        deadline = time.monotonic() + timeout_s
        if self.send(request) and (reply := self.reply(timeout_s)):
            return reply, False
        hung = self.alive and time.monotonic() >= deadline
        self.kill()
        return None, hung

    def kill(self) -> None:
        """End the process and close its pipe. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


class Seat:
    """A place for one grading process, which is started when it is first needed and again after its death."""

    def __init__(self, start: Callable[[], GradingProcess]) -> None:
        self._start = start
        self._process: GradingProcess | None = None
        self._lock = threading.Lock()
        self._closed = False

    def process(self) -> GradingProcess:
        """The living process. Raises GraderLost, RuntimeError when closed."""
        if self._process is None or not self._process.alive:
            if self._process is not None:
                self._process.kill()
            if not self._closed:
                process = self._start()
                with self._lock:
                    self._process = process
        if self._closed:  # perhaps while it started
            self.close()
            raise RuntimeError("the grading processes are closed")
        assert self._process is not None
        return self._process

    def close(self) -> None:
        """End the process, from any thread; whoever waits for it finds it dead."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()


class Seats:
    """`count` seats. `run` gives work the next free one."""

    def __init__(self, count: int, start: Callable[[], GradingProcess], name: str) -> None:
        # One thread a seat: a process dies with the thread that started it, so threads live as long as the seats.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._seats = [Seat(start) for _ in range(count)]
        self._free: queue.SimpleQueue[Seat] = queue.SimpleQueue()
        for seat in self._seats:
            self._free.put(seat)

    def run(self, work: Callable[[Seat], T]) -> Future[T]:
        """What `work` returns, in a thread."""
        return self._threads.submit(self._run, work)

    def _run(self, work: Callable[[Seat], T]) -> T:
        seat = self._free.get()
        try:
            return work(seat)
        finally:
            self._free.put(seat)

    def close(self) -> None:
        """End all processes. Work that waits for a seat is cancelled."""
        for seat in self._seats:
            seat.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
