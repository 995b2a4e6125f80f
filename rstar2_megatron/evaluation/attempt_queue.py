"""Attempts that an evaluation has not finished; engines pull them, so a fast engine does more. Pure."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.trajectory import Problem

MAX_TRIES = 3  # of one attempt that infrastructure spoils


class AttemptQueue:
    """Attempts that wait for an engine; those that engines run are counted."""

    def __init__(self, problems: Sequence[Problem], attempts: Iterable[tuple[int, int]], slice_size: int) -> None:
        """attempts: (group, index), attempts at one problem next to each other; `group` is the number of the problem.

        slice_size: most attempts at one problem that an engine takes at a time.
        """
        self._problems = problems
        self._waiting = deque(attempts)
        self._unfinished = len(self._waiting)
        self._slice_size = slice_size
        self._tries: Counter[tuple[int, int]] = Counter()
        self._changed = asyncio.Event()

    async def next(self, room: int) -> list[Slice] | None:
        """Some attempts at one problem, which share its prompt; None when all are finished.

        Waits while a running attempt may still be tried again. `room` is not used: the engine's admission queue holds
        what it cannot run yet.
        """
        while not self._waiting:
            if not self._unfinished:
                return None
            self._changed.clear()
            await self._changed.wait()
        group = self._waiting[0][0]
        taken: list[int] = []
        while self._waiting and self._waiting[0][0] == group and len(taken) < self._slice_size:
            taken.append(self._waiting.popleft()[1])
        return [Slice(group, self._problems[group], taken)]

    def ended(self, group: int, index: int, *, usable: bool) -> None:
        """An engine has ended an attempt. One that was spoiled waits again, at the end, up to MAX_TRIES tries."""
        self._tries[group, index] += 1
        if usable or self._tries[group, index] == MAX_TRIES:
            self._unfinished -= 1
        else:
            self._waiting.append((group, index))
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
