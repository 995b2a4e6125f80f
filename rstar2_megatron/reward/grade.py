"""Sets the reward of trajectories, for training and evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rstar2_megatron.algorithm.response_text import response_text
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.trajectory import Problem, Trajectory


async def grade_trajectories(pool: GraderPool, problem: Problem, trajectories: Sequence[Trajectory]) -> None:
    """Set `reward`, `grade_detail` and `answer` of each trajectory of `problem`.

    The graded text is the model's own; in the pool's released mode it is the whole response with the tools' output.
    """
    texts = [response_text(t) if pool.mode == "released" else "\n".join(t.assistant_texts) for t in trajectories]
    grades = await asyncio.gather(*(pool.grade(text, problem.solutions) for text in texts))
    for t, grade in zip(trajectories, grades, strict=True):
        t.reward, t.grade_detail, t.answer = grade.reward, grade.detail, grade.answer
