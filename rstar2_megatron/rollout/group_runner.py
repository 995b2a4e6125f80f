"""Keeps one engine busy: pulls problems when its KV budget has room, hands back finished groups.

Work is pulled, so a slow engine takes less of it. Rollouts of one problem start together on one engine and share
the prompt in its prefix cache. Nothing here can hang: every trajectory has its own deadline, and pulling runs
beside the rollouts.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.kv_budget import KVBudget
from rstar2_megatron.trajectory import Group, Problem, Trajectory

NextProblem = Callable[[], Awaitable[Problem | None]]
OnTrajectory = Callable[[Problem, Trajectory], Awaitable[None]]


@dataclass(slots=True)
class _Waiting:
    """A rollout that has not been admitted."""

    problem: Problem
    rollout_index: int
    prompt_tokens: int
    max_tokens: int
    since: float

    @property
    def key(self) -> tuple[str, int]:
        return (self.problem.query_id, self.rollout_index)


async def run_groups(
    next_problem: NextProblem,
    loop: AgentLoop,
    budget: KVBudget,
    *,
    group_size: int,
    on_trajectory: OnTrajectory | None = None,
) -> AsyncGenerator[Group, None]:
    """Roll out every problem that `next_problem` gives, `group_size` times each, until it gives None.

    Yields each group as its last rollout ends, with its trajectories in rollout order. `on_trajectory` is awaited
    as each one ends (for scoring beside generation). Leaving the iterator cancels what still runs. Raises
    ValueError for a trajectory that can never fit the engine, and what `next_problem` or `on_trajectory` raise.
    """
    runner = _Runner(next_problem, loop, budget, group_size, on_trajectory)
    try:
        async for group in runner.groups():
            yield group
    finally:
        await runner.stop()


class _Runner:
    def __init__(
        self,
        next_problem: NextProblem,
        loop: AgentLoop,
        budget: KVBudget,
        group_size: int,
        on_trajectory: OnTrajectory | None,
    ) -> None:
        self.next_problem = next_problem
        self.loop = loop
        self.budget = budget
        self.group_size = group_size
        self.on_trajectory = on_trajectory
        self.waiting: deque[_Waiting] = deque()
        self.running: set[asyncio.Task[tuple[_Waiting, Trajectory]]] = set()
        self.unfinished: dict[str, Group] = {}
        self.pull: asyncio.Future[Problem | None] | None = None
        self.exhausted = False
        self.retractions_seen = 0

    async def groups(self) -> AsyncIterator[Group]:
        while True:
            self._admit()
            # ask for one more problem only when all that we have is running and there is room
            if not self.waiting and not self.exhausted and self.pull is None and self.budget.has_slot():
                self.pull = asyncio.ensure_future(self.next_problem())
            pending: set[asyncio.Future[object]] = {*self.running}  # type: ignore[arg-type]
            if self.pull is not None:
                pending.add(self.pull)  # type: ignore[arg-type]
            if not pending:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if self.pull is not None and self.pull.done():
                problem, self.pull = self.pull.result(), None
                if problem is None:
                    self.exhausted = True
                else:
                    self._enqueue(problem)
            for group in self._collect():
                yield group

    def _enqueue(self, problem: Problem) -> None:
        prompt_tokens = len(self.loop.template.prompt_ids(problem))
        max_tokens = prompt_tokens + max(1, self.loop.response_budget(prompt_tokens))
        if problem.query_id in self.unfinished:
            raise ValueError(
                f"problem {problem.query_id} is already being rolled out: query_id must be unique"
            )
        self.unfinished[problem.query_id] = Group(problem)
        now = time.monotonic()
        for index in range(self.group_size):
            self.waiting.append(_Waiting(problem, index, prompt_tokens, max_tokens, now))

    def _admit(self) -> None:
        while self.waiting:
            rollout = self.waiting[0]
            if not self.budget.try_admit(
                rollout.key, rollout.problem.query_id, rollout.prompt_tokens, rollout.max_tokens
            ):
                return
            self.waiting.popleft()
            self.loop.stats.admission_seconds += time.monotonic() - rollout.since
            self.running.add(asyncio.create_task(self._run(rollout)))

    async def _run(self, rollout: _Waiting) -> tuple[_Waiting, Trajectory]:
        finished = False
        try:
            trajectory = await self.loop.run(
                rollout.problem,
                rollout.rollout_index,
                on_progress=lambda length: self.budget.settle(rollout.key, length),
            )
            finished = trajectory.usable
        finally:
            self.budget.release(rollout.key, finished=finished)
        if self.on_trajectory is not None:
            await self.on_trajectory(rollout.problem, trajectory)
        return rollout, trajectory

    def _collect(self) -> list[Group]:
        """Groups whose last rollout has ended."""
        finished = []
        for task in [task for task in self.running if task.done()]:
            self.running.remove(task)
            rollout, trajectory = task.result()
            group = self.unfinished[rollout.problem.query_id]
            group.trajectories.append(trajectory)
            if len(group.trajectories) == self.group_size:
                group.trajectories.sort(key=lambda t: t.rollout_index)
                finished.append(self.unfinished.pop(rollout.problem.query_id))
        retractions = self.loop.stats.retractions
        self.budget.evicted(max(0, retractions - self.retractions_seen))
        self.retractions_seen = retractions
        return finished

    async def stop(self) -> None:
        tasks: list[asyncio.Future[object]] = [*self.running]  # type: ignore[list-item]
        if self.pull is not None:
            tasks.append(self.pull)  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
