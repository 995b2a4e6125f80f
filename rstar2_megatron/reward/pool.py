"""Grades responses within a time and memory limit, from any thread and event loop.

Plain text and numbers are compared in the caller's process; answers that need algebra, and in released mode all responses, in a
worker process. A worker that exceeds its limits or dies is replaced, and the answer gets reward 0 with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Literal

from rstar2_megatron.reward.answer_text import extract_answer
from rstar2_megatron.reward.math_grader import CORRECT, UNGRADABLE, quick_grade

Mode = Literal["paper", "released"]

GRADER_TIMEOUT = "grader_timeout"
_MEMORY_BYTES = 2 * 1024**3  # address space; numpy and sympy alone map several hundred MB
_START_TIMEOUT_S = 120.0


class GraderLost(RuntimeError):
    """A grading process could not be started."""


@dataclass(frozen=True, slots=True)
class Grade:
    """`reward` is 1.0 or 0.0, `answer` the extracted answer.

    `detail` is correct, wrong, no_answer_tag, no_box, ungradable or grader_timeout.
    """

    reward: float
    detail: str
    answer: str | None = None


class GraderPool:
    """`num_workers` grading processes, started when first needed.

    `timeout_s` bounds the grading of one answer, without the wait for a free worker. `mode` is the graded text: "paper", the
    last box inside the last `<answer>`; "released", the whole response (`released_grader`).
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 2.0, *, mode: Mode = "paper") -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"num_workers={num_workers} and timeout_s={timeout_s} must be positive")
        self.mode = mode
        self._timeout_s = timeout_s
        # One thread per worker: a worker dies with the thread that started it, so threads live as long as
        # the pool.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False

    async def grade(self, response_text: str, solutions: list[str]) -> Grade:
        """Grade a response. Raises GraderLost, RuntimeError if closed."""
        grade = self._begin(self.mode, response_text, solutions)
        return grade if isinstance(grade, Grade) else await asyncio.wrap_future(grade)

    def grade_now(self, response_text: str, solutions: list[str], mode: Mode | None = None) -> Grade:
        """As `grade`, but blocking. `mode` replaces that of the pool."""
        grade = self._begin(mode or self.mode, response_text, solutions)
        return grade if isinstance(grade, Grade) else grade.result()

    def equal(self, a: str, b: str) -> bool:
        """Whether each answer is right where the other is the solution; blocking. False when the time limit passes."""
        return all(self.grade_now(f"<answer>\\boxed{{{x}}}</answer>", [y], "paper").reward > 0 for x, y in ((a, b), (b, a)))

    def close(self) -> None:
        """End all workers. Unfinished grades get `grader_timeout`."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.kill()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, mode: Mode, response_text: str, solutions: list[str]) -> Grade | Future[Grade]:
        """A grade, or that which a worker will give."""
        if self._closed:
            raise RuntimeError("the grader pool is closed")
        text = response_text
        if mode == "paper":
            answer, why = extract_answer(response_text)
            if answer is None:
                return Grade(0.0, why)
            if (detail := quick_grade(answer, solutions)) is not None:
                return Grade(float(detail == CORRECT), detail, answer)
            text = answer
        return self._threads.submit(self._slow, mode, text, list(solutions))

    def _slow(self, mode: Mode, text: str, solutions: list[str]) -> Grade:
        """Grade in a worker. When it dies, another one tries the answer in the remaining time: the answer is to blame only
        if it kills that one too."""
        worker = self._idle.get()
        try:
            left = self._timeout_s
            for _ in range(2):
                if worker is None or not worker.alive:
                    self._forget(worker)
                    worker = self._start_worker()
                start = time.monotonic()
                detail, answer = worker.ask(mode, text, solutions, left)
                left -= time.monotonic() - start
                if worker.alive:
                    break
                self._forget(worker)
                worker = None
                if detail == GRADER_TIMEOUT or left <= 0:
                    break
        finally:
            self._idle.put(worker)
        return Grade(float(detail == CORRECT), detail, text if mode == "paper" else answer)

    def _forget(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.kill()

    def _start_worker(self) -> _Worker:
        if not self._closed:
            worker = _Worker(self.mode)
            with self._lock:
                if not self._closed:
                    self._workers.add(worker)
                    return worker
            worker.kill()
        raise RuntimeError("the grader pool is closed")


class _Worker:
    """One grading process and its pipe."""

    def __init__(self, mode: Mode) -> None:
        command = [sys.executable, "-m", "rstar2_megatron.reward.worker", mode, str(_MEMORY_BYTES)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdout=subprocess.DEVNULL,  # what libraries print
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        if self._reply(_START_TIMEOUT_S) != b"ready":
            code = self._process.poll()
            self.kill()
            raise GraderLost(
                f"a grading process did not start within {_START_TIMEOUT_S:.0f} s (exit code {code}); run "
                f"`{' '.join(command)} 1` to see why"
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, mode: Mode, text: str, solutions: list[str], timeout_s: float) -> tuple[str, str | None]:
        """(verdict on an answer or a whole response, answer that released mode found).

        What hangs or crashes is killed: GRADER_TIMEOUT or UNGRADABLE.
        """
        request = {"mode": mode, "text": text, "solutions": solutions}
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):  # it has died
            self._pipe.send_bytes(json.dumps(request).encode())
            if reply := self._reply(timeout_s):
                detail, answer = json.loads(reply)
                return detail, answer
        hung = self.alive and time.monotonic() >= deadline
        self.kill()
        return GRADER_TIMEOUT if hung else UNGRADABLE, None

    def _reply(self, timeout_s: float) -> bytes | None:
        """The next reply; None when the time is over or the process has ended."""
        try:
            return self._pipe.recv_bytes() if self._pipe.poll(timeout_s) else None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            return None

    def kill(self) -> None:
        """End the process and close its pipe. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
