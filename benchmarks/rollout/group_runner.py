"""Whole groups on one engine, without a driver: for evaluation outside a run, benchmarks and tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable

from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.trajectory_runner import TrajectoryRunner
from rstar2_megatron.trajectory import Group, Problem, Trajectory

NextProblem = Callable[[], Awaitable[Problem | None]]
OnTrajectory = Callable[[Problem, Trajectory], Awaitable[None]]


async def run_groups(
    next_problem: NextProblem, loop: AgentLoop, budget: KVBudget, *, group_size: int, on_trajectory: OnTrajectory | None = None
) -> AsyncGenerator[Group, None]:
    """Roll out every problem that `next_problem` gives, `group_size` times each, until it gives None.

    Yields each group as its last rollout ends, with its trajectories in rollout order. `on_trajectory` is awaited
    as each one ends. Leaving the iterator cancels what still runs. Raises ValueError for a trajectory that can never
    fit the engine, and what `next_problem` or `on_trajectory` raise.
    """
    numbers = itertools.count()
    unfinished: dict[int, Group] = {}
    finished: asyncio.Queue[Group | None] = asyncio.Queue()

    async def next_work(room: int) -> list[Slice] | None:
        problem = await next_problem()
        if problem is None:
            return None
        number = next(numbers)
        unfinished[number] = Group(problem)
        return [Slice(number, problem, list(range(group_size)))]

    async def ended(work: Slice, trajectory: Trajectory) -> None:
        if on_trajectory is not None:
            await on_trajectory(work.problem, trajectory)
        group = unfinished[work.group]
        group.trajectories.append(trajectory)
        if len(group.trajectories) == group_size:
            group.trajectories.sort(key=lambda t: t.rollout_index)
            finished.put_nowait(unfinished.pop(work.group))

    runner = TrajectoryRunner(loop, AdmissionQueue(budget), next_work, ended)
    running = asyncio.create_task(runner.run())
    running.add_done_callback(lambda _: finished.put_nowait(None))
    try:
        while (group := await finished.get()) is not None:
            yield group
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])
