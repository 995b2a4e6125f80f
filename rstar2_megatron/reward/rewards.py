"""Sets the reward of trajectories, for training, evaluation and search."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from rstar2_megatron.algorithm.response_text import response_text
from rstar2_megatron.reward.own import OwnReward
from rstar2_megatron.reward.own_pool import AsyncCaller, Item, ProcessPool
from rstar2_megatron.reward.pool import Grade, GraderPool
from rstar2_megatron.settings.sections.environment import RewardSettings, RewardTerm
from rstar2_megatron.trajectory import FinishReason, Trajectory


class Rewards:
    """The functions of `reward.terms` or `reward.function`, with the processes and the event loop that they need."""

    def __init__(self, settings: RewardSettings) -> None:
        """Raises UserCodeError when a function cannot be loaded or called."""
        self._settings = settings
        self._terms = settings.weighted
        self._own = {
            term.name: OwnReward(term.function, settings.arguments)
            for term in self._terms
            if not isinstance(term.function, str)
        }
        plain = {name: function for name, function in self._own.items() if not function.is_async}
        timeout_s = settings.function_timeout_s
        self._pool = GraderPool(settings.num_workers, settings.timeout_s, mode=settings.mode)
        self._processes = ProcessPool(plain, settings.num_workers, timeout_s, settings.function_memory_mb)
        self._caller: AsyncCaller | None = None  # its thread is for async functions alone
        if len(plain) < len(self._own):
            self._caller = AsyncCaller(settings.function_concurrency, timeout_s, settings.function_retries)

    async def grade(self, items: Sequence[Item]) -> None:
        """Set `reward`, `positive`, `reward_terms`, `grade_detail` and `answer` of each trajectory.

        A trajectory of which a function of the user failed ends as INFRASTRUCTURE, with `error` and `user_error`. Raises
        GraderLost.
        """
        by_term = await asyncio.gather(*(self._grades(term, items) for term in self._terms))
        for (_, trajectory), *grades in zip(items, *by_term, strict=True):
            self._set(trajectory, grades)

    async def _grades(self, term: RewardTerm, items: Sequence[Item]) -> Sequence[Grade]:
        if term.function == "environment":
            return [_environments(trajectory) for _, trajectory in items]
        if term.function == "math":
            return await asyncio.gather(*map(self._math, items))
        function = self._own[term.name]
        if function.is_async:
            assert self._caller is not None
            return await asyncio.gather(*(self._caller.grade(function, item) for item in items))
        return await self._processes.grades(term.name, items)

    async def _math(self, item: Item) -> Grade:
        """The graded text is the model's own; in released mode it is the whole response with the tools' output."""
        problem, t = item
        text = response_text(t) if self._pool.mode == "released" else "\n".join(t.assistant_texts)
        return await self._pool.grade(text, problem.solutions)

    def _set(self, t: Trajectory, grades: Sequence[Grade]) -> None:
        t.response_text = ""
        for grade in grades:
            if grade.failure:
                t.finish_reason, t.error, t.user_error = FinishReason.INFRASTRUCTURE, grade.failure, grade.kind
                return
        t.reward = sum(term.weight * grade.reward for term, grade in zip(self._terms, grades))
        t.positive = t.reward > self._settings.positive_above
        t.grade_detail = next((g.detail for g in grades if g.detail), "positive" if t.positive else "negative")
        t.answer = next((g.answer for g in grades if g.answer is not None), None)
        if self._own or len(grades) > 1:
            several = len(grades) > 1
            t.reward_terms = {
                f"{term.name}/{name}" if several else name: value
                for term, grade in zip(self._terms, grades)
                for name, value in grade.others.items()
            }
            t.reward_terms |= {term.name: grade.reward for term, grade in zip(self._terms, grades)}

    def close(self) -> None:
        self._pool.close()
        self._processes.close()
        if self._caller is not None:
            self._caller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environments(trajectory: Trajectory) -> Grade:
    given = trajectory.environment_reward
    return Grade(given) if given is not None else Grade(failure="the loop set no reward", kind="NoReward")
