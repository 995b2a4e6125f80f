"""Submissions of type `math`: the project's grader decides whether `solution` equals `expected_output`."""

from __future__ import annotations

import time
from typing import Any

from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.reward.pool import GRADER_TIMEOUT, GraderLost, GraderPool


class MathJudge:
    """The grading processes of this server. They start with the first submission that needs one."""

    def __init__(self, num_workers: int = 2, timeout_s: float = 5.0) -> None:
        self._pool = GraderPool(num_workers, timeout_s)

    async def grade(self, sub_id: str, solution: str, expected: str) -> dict[str, Any]:
        """A SubmissionResult: `success` is the verdict, `stdout` its reason (correct, wrong, ungradable, ...).

        `solution` is a whole response with its box inside `<answer>`, or the bare answer.
        """
        boxed = solution if "<answer>" in solution else f"<answer>\\boxed{{{solution}}}</answer>"
        started = time.monotonic()
        try:
            grade = await self._pool.grade(boxed, [expected])
        except GraderLost as error:
            return make_result(sub_id, Outcome.INTERNAL_ERROR, stderr=str(error))
        return make_result(
            sub_id,
            Outcome.TIMEOUT if grade.detail == GRADER_TIMEOUT else Outcome.OK,
            cost=time.monotonic() - started,
            stdout=f"{grade.detail}\n",
            success=grade.reward == 1.0,
        )

    def close(self) -> None:
        self._pool.close()
