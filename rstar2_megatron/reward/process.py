"""Grading processes: each gets requests over a pipe, has a time limit for each reply, and may be killed at any time."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Pipe, wait
from typing import Any, TypeVar

T = TypeVar("T")

START_TIMEOUT_S = 120.0
MEMORY_MB = 2048  # address space; numpy and sympy alone map several hundred MB


class GraderLost(RuntimeError):
    """A grading process could not be started."""


class GradingProcess:
    """A place for one `reward.worker`, which dies with the thread that started it."""

    def __init__(self, kind: str, about: tuple[Any, ...], quiet: bool) -> None:
        """about: arguments of the worker's kind. quiet: what it prints is dropped."""
        self._command = [sys.executable, "-m", "rstar2_megatron.reward.worker", kind]
        self._about = pickle.dumps(about)
        self._output = subprocess.DEVNULL if quiet else None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: io.FileIO | None = None  # a descriptor that can be read when the process has ended
        self._lock = threading.Lock()
        self._closed = False
        self.hung = False
        """Whether the last reply did not come in time."""

    def start(self) -> None:
        """Start the process, unless it lives. Raises GraderLost, RuntimeError when closed."""
        if self.alive:
            return
        with self._lock:
            self._check_open()
            self.kill()
            self._pipe, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,  # so that what the user's code started ends with it
                )
            self._ended = io.FileIO(os.pidfd_open(self._process.pid))
        self.send(self._about)
        if (reply := self.reply(START_TIMEOUT_S)) != b"ready":
            self._check_open()  # perhaps it was closed meanwhile
            code = self._process.poll()
            self.kill()
            if reply:  # what is wrong with code of the user's
                raise GraderLost(reply.decode())
            what = f"did not start within {START_TIMEOUT_S:.0f} s" if self.hung else f"ended with code {code} as it started"
            own = "each loads the rewards' modules: load what is large at the first call"
            why = f"run `{' '.join(self._command)} 1` to see why" if self._output else own
            raise GraderLost(f"a grading process {what}; {why}")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the grading processes are closed")

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def signal(self) -> int:
        """Number of the signal that ended it, 0 while it lives or when it left by itself."""
        return max(-((self._process and self._process.poll()) or 0), 0)

    def send(self, request: bytes) -> bool:
        """Send a request. False when the process has died."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(request)
            return True
        self.kill()
        return False

    def reply(self, timeout_s: float) -> bytes | None:
        """The next reply. None: it did not come in time (`hung`) or the process died, which is then ended."""
        self.hung = False
        try:
            # A process that the user's code forked may hold the pipe open behind the end of the one that is asked.
            assert self._ended is not None
            ready = wait([self._pipe, self._ended.fileno()], timeout_s)
            if self._pipe in ready:
                return self._pipe.recv_bytes()
            self.hung = not ready
        except (EOFError, OSError, ValueError):  # ValueError: closed meanwhile
            with contextlib.suppress(subprocess.TimeoutExpired):  # its exit code comes a moment later
                assert self._process is not None
                self._process.wait(1.0)
        self.kill()
        return None

    def kill(self) -> None:
        """End the process with its process group, and close its pipe. Safe to call twice."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            if self._ended is not None:
                self._ended.close()

    def close(self) -> None:
        """End the process for good, from any thread; whoever waits for it finds it dead."""
        with self._lock:
            self._closed = True
            self.kill()


class GradingProcesses:
    """`count` processes of one kind. `run` gives work the next free one."""

    def __init__(self, count: int, kind: str, about: tuple[Any, ...], *, quiet: bool) -> None:
        self._processes = [GradingProcess(kind, about, quiet) for _ in range(count)]
        self._left = iter(self._processes)
        self._own = threading.local()
        # A process dies with the thread that started it, so each has a thread of its own.
        self._threads = ThreadPoolExecutor(count, f"{kind} reward", self._take)

    def _take(self) -> None:
        self._own.process = next(self._left)

    def run(self, work: Callable[[GradingProcess], T]) -> Future[T]:
        """What `work` returns, in a thread."""
        return self._threads.submit(lambda: work(self._own.process))

    def close(self) -> None:
        """End all processes. Work that waits for one is cancelled."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
