"""Submissions of type `math`: the project's grader decides whether `solution` equals `expected_output`."""

from __future__ import annotations

import time
from typing import Any

from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.reward.pool import GRADER_TIMEOUT, GraderLost, GraderPool


async def grade(pool: GraderPool, sub_id: str, solution: str, expected: str) -> dict[str, Any]:
    """A SubmissionResult: `success` is the verdict, `stdout` its reason (correct, wrong, ungradable, ...).

    `solution` is a whole response with its box inside `<answer>`, or the bare answer.
    """
    boxed = solution if "<answer>" in solution else f"<answer>\\boxed{{{solution}}}</answer>"
    started = time.monotonic()
    try:
        verdict = await pool.grade(boxed, [expected])
    except GraderLost as error:
        return make_result(sub_id, Outcome.INTERNAL_ERROR, stderr=str(error))
    outcome = Outcome.TIMEOUT if verdict.detail == GRADER_TIMEOUT else Outcome.OK
    cost, success = time.monotonic() - started, verdict.reward == 1.0
    return make_result(sub_id, outcome, cost=cost, stdout=f"{verdict.detail}\n", success=success)
