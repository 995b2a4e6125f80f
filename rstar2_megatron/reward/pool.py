"""Grades responses within a time and memory limit, from any thread and event loop.

Plain text and numbers are compared in the caller's process; answers that need algebra, and in released mode all responses, in a
worker process. A worker that exceeds its limits or dies is replaced, and the answer gets reward 0 with the reason.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from rstar2_megatron.reward.answer_text import extract_answer
from rstar2_megatron.reward.math_grader import CORRECT, UNGRADABLE, quick_grade
from rstar2_megatron.reward.process import MEMORY_MB, GraderLost, GradingProcess, GradingProcesses

__all__ = ["Grade", "GraderLost", "GraderPool"]

Mode = Literal["paper", "released"]

GRADER_TIMEOUT = "grader_timeout"


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader or a reward function said of one trajectory, or why it said nothing.

    Of the built-in grader: `reward` is 1.0 or 0.0, `answer` the extracted answer, `detail` is correct, wrong, no_answer_tag,
    no_box, ungradable or grader_timeout.
    """

    reward: float = 0.0
    detail: str = ""
    answer: str | None = None
    others: dict[str, float] = field(default_factory=dict)
    """Further numbers by name, to be logged."""
    failure: str = ""
    """Why there is no reward, with the user's file and line."""
    kind: str = ""
    """Type of the failure: the exception's name, Timeout, or Killed."""


class GraderPool:
    """`num_workers` grading processes, started when first needed.

    `timeout_s` bounds the grading of one answer, without the wait for a free worker. `mode` is the graded text: "paper", the
    last box inside the last `<answer>`; "released", the whole response (`released_grader`).
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 2.0, *, mode: Mode = "paper") -> None:
        self.mode = mode
        self._timeout_s = timeout_s
        self._processes = GradingProcesses(num_workers, "math", (mode, MEMORY_MB), quiet=True)
        self._closed = False

    async def grade(self, response_text: str, solutions: list[str]) -> Grade:
        """Grade a response. Raises GraderLost, RuntimeError if closed."""
        grade = self._begin(response_text, solutions)
        return grade if isinstance(grade, Grade) else await asyncio.wrap_future(grade)

    def grade_now(self, response_text: str, solutions: list[str]) -> Grade:
        """As `grade`, but blocking."""
        grade = self._begin(response_text, solutions)
        return grade if isinstance(grade, Grade) else grade.result()

    def equal(self, a: str, b: str) -> bool:
        """Whether each answer is right where the other is the solution; blocking. False when the time limit passes."""
        return all(self.grade_now(f"<answer>\\boxed{{{x}}}</answer>", [y]).reward > 0 for x, y in ((a, b), (b, a)))

    def close(self) -> None:
        """End all workers. Unfinished grades get `grader_timeout`."""
        self._closed = True
        self._processes.close()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, response_text: str, solutions: list[str]) -> Grade | Future[Grade]:
        """A grade, or that which a worker will give."""
        if self._closed:
            raise RuntimeError("the grader pool is closed")
        text = response_text
        if self.mode == "paper":
            answer, why = extract_answer(response_text)
            if answer is None:
                return Grade(0.0, why)
            if (detail := quick_grade(answer, solutions)) is not None:
                return Grade(float(detail == CORRECT), detail, answer)
            text = answer
        return self._processes.run(functools.partial(self._slow, text, list(solutions)))

    def _slow(self, text: str, solutions: list[str], worker: GradingProcess) -> Grade:
        """Grade in a worker. When it dies, another one tries the answer in the remaining time: the answer is to blame only
        if it kills that one too."""
        request = json.dumps([text, solutions]).encode()
        left = self._timeout_s
        for _ in range(2):
            worker.start()
            start = time.monotonic()
            reply = worker.reply(left) if worker.send(request) else None
            detail, answer = json.loads(reply) if reply else (GRADER_TIMEOUT if worker.hung else UNGRADABLE, None)
            left -= time.monotonic() - start
            if reply or detail == GRADER_TIMEOUT or left <= 0:
                break
        return Grade(float(detail == CORRECT), detail, text if self.mode == "paper" else answer)
