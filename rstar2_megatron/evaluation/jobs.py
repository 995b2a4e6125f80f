"""The attempts that an evaluation has left, and the engines that pull them. Pure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.trajectory import Problem

MAX_ATTEMPTS = 3  # of one sample that infrastructure spoils


@dataclass(slots=True)
class Job:
    """One attempt; `group` is the problem's place."""

    group: int
    problem: Problem
    index: int
    attempts: int = 0


class Jobs:
    """The attempts that are left; engines pull them, so a quick engine does more."""

    def __init__(self, jobs: Iterable[Job], slice_size: int) -> None:
        self._waiting = deque(jobs)
        self._unfinished = len(self._waiting)
        self._slice_size = slice_size
        self._running: dict[tuple[int, int], Job] = {}
        self._changed = asyncio.Event()

    async def next(self, room: int) -> list[Slice] | None:
        """Some attempts at one problem, which share its prompt; None when all are finished.

        Waits while a running attempt may still come back.
        """
        while not self._waiting:
            if not self._unfinished:
                return None
            self._changed.clear()
            await self._changed.wait()
        first = self._waiting[0]
        taken: list[int] = []
        while self._waiting and self._waiting[0].group == first.group and len(taken) < self._slice_size:
            job = self._waiting.popleft()
            self._running[job.group, job.index] = job
            taken.append(job.index)
        return [Slice(first.group, first.problem, taken)]

    def ended(self, group: int, index: int, *, usable: bool) -> None:
        """Take a job back from an engine; one that was spoiled is put at the end unless it was tried often enough."""
        job = self._running.pop((group, index))
        job.attempts += 1
        if usable or job.attempts == MAX_ATTEMPTS:
            self._unfinished -= 1
        else:
            self._waiting.append(job)
        self._changed.set()


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
