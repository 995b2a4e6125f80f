"""Keeps one engine busy: takes slices when its scheduler has room, runs their trajectories, parks them on request.

Nothing here can hang: every trajectory has its own deadline, and asking for work runs beside the rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rstar2_megatron.rollout.agent_loop import AgentLoop, Preemption
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost, EngineReport
from rstar2_megatron.rollout.scheduling.admission_queue import Admission, AdmissionQueue
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.trajectory import FinishReason, Trajectory

NextWork = Callable[[int], Awaitable[list[Slice] | None]]
OnTrajectory = Callable[[Slice, Trajectory], Awaitable[None]]
OnEngineGone = Callable[[str], Awaitable[None]]

_Key = tuple[int, int]  # group, rollout index


@dataclass(slots=True)
class _Waiting:
    work: Slice
    since: float
    preempted: bool = False  # its tokens are in work.parked


class TrajectoryRunner:
    """One phase of one engine: `run` until `next_work` gives None and everything taken has ended.

    `next_work` is told about how many trajectories would fit and gives slices. `on_trajectory` is awaited as each
    trajectory ends or is parked, for scoring beside generation. What either raises ends the run; so does a
    trajectory that can never fit the engine (ValueError).

    When the engine is gone, `on_engine_gone` hears the reason, nothing more is asked for, and everything taken comes to
    `on_trajectory` without a finish reason, as far as it is: another engine can continue it. Without that callback the
    run ends with EngineLost.
    """

    def __init__(
        self,
        loop: AgentLoop,
        scheduler: AdmissionQueue,
        next_work: NextWork,
        on_trajectory: OnTrajectory,
        on_engine_gone: OnEngineGone | None = None,
    ) -> None:
        self.loop = loop
        self.scheduler = scheduler
        self._next_work = next_work
        self._on_trajectory = on_trajectory
        self._on_engine_gone = on_engine_gone
        self._waiting: dict[_Key, _Waiting] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._preemptions: dict[_Key, Preemption] = {}  # of running trajectories
        self._preempting: set[asyncio.Task[None]] = set()
        self._lengths: dict[_Key, int] = {}  # of running trajectories, as last heard
        self._pull: asyncio.Future[list[Slice] | None] | None = None
        self._no_more = False
        self._gave_back = False
        self._reported_capacity = 0  # tokens of KV cache in the engine's last report
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._evictions_seen = loop.stats.retractions

    async def run(self) -> None:
        try:
            while True:
                if self.loop.engine_gone:
                    await self._give_back()
                else:
                    self._start_what_fits()
                    self._ask_for_work()
                if not self._running and self._pull is None:
                    return
                self._wake.clear()
                await self._wake.wait()
                if self._failure is not None:
                    raise self._failure
        finally:
            await self._cancel()

    async def park(self, *, cut: bool) -> None:
        """End the phase now: running trajectories come to `on_trajectory` as far as they are, within a tool call.

        With `cut` they are over (FinishReason.CUT); otherwise `run` of a later phase goes on with them. What had not
        started is forgotten; what was preempted, or has waited since an earlier phase, comes back as it is.
        """
        self._no_more = True
        self.loop.parking, self.loop.cutting = True, cut
        self.scheduler.withdraw()
        waiting, self._waiting = self._waiting, {}
        for (_, index), one in waiting.items():
            if index in one.work.parked:  # preempted, or carried here and not started again
                await self._hand_back(one.work, one.work.parked[index])
        with contextlib.suppress(EngineLost, EngineError):  # then nothing runs there
            await self.loop.engine.abort_all()

    async def _give_back(self) -> None:
        """The engine is gone: what waits here goes back, what runs follows as each trajectory notices."""
        if not self._gave_back:
            self._gave_back = self._no_more = True
            if self._on_engine_gone is None:
                raise EngineLost(self.loop.engine_gone)
            await self._on_engine_gone(self.loop.engine_gone)
        self.scheduler.withdraw()
        waiting, self._waiting = self._waiting, {}
        for (_, index), one in waiting.items():
            await self._hand_back(one.work, one.work.parked.get(index) or _unstarted(one.work, index))

    def observe(self, report: EngineReport) -> None:
        """The engine's report: current lengths and evictions go to the scheduler, the load to the statistics."""
        stats = self.loop.stats
        stats.observe(report)
        if self._reported_capacity not in (0, report.max_total_tokens):
            # the engine was restarted and has found another amount of free memory
            self.scheduler.budget.capacity_tokens = report.max_total_tokens
        self._reported_capacity = report.max_total_tokens
        self.scheduler.budget.observe(
            stats.retractions - self._evictions_seen,
            self._lengths,
            report.used_tokens,
            [key for key, preemption in self._preemptions.items() if preemption.at_tool],
        )
        self._evictions_seen = stats.retractions
        for key in self.scheduler.preempt():
            assert isinstance(key, tuple)
            task = asyncio.create_task(self.loop.preempt(self._preemptions[key]))
            self._preempting.add(task)
            task.add_done_callback(self._preempting.discard)
        self._wake.set()  # there may be room now

    # ------------------------------------------------------------------------------------------- work

    def _ask_for_work(self) -> None:
        if self._pull is None and not self._no_more and self.scheduler.wants_work():
            self._pull = asyncio.ensure_future(self._next_work(self.scheduler.budget.room()))
            self._pull.add_done_callback(self._pulled)

    def _pulled(self, pull: asyncio.Future[list[Slice] | None]) -> None:
        self._pull = None
        self._wake.set()
        if pull.cancelled():
            return
        if (error := pull.exception()) is not None:
            self._failure = error
        elif (work := pull.result()) is None:
            self._no_more = True
        elif not self.loop.parking:
            for one in work:
                self._enqueue(one)
        else:  # it came too late; what was carried here is carried on
            for one in work:
                for trajectory in one.parked.values():
                    self._watch(self._hand_back(one, trajectory))

    def _enqueue(self, work: Slice) -> None:
        for index in work.indices:
            self._waiting[work.group, index] = _Waiting(work, time.monotonic())
        self.scheduler.add([self._admission(work, index) for index in work.indices])

    def _admission(self, work: Slice, index: int) -> Admission:
        prompt_tokens = len(self.loop.template.prompt_ids(work.problem))
        max_tokens = prompt_tokens + max(1, self.loop.response_budget(prompt_tokens))
        parked = work.parked.get(index)
        length = max(parked.length, prompt_tokens) if parked else prompt_tokens
        return Admission((work.group, index), work.group, prompt_tokens, max_tokens, length)

    def _start_what_fits(self) -> None:
        for admission in self.scheduler.admit():
            key = admission.key
            assert isinstance(key, tuple)
            waiting = self._waiting.pop(key)
            self.loop.stats.admission_seconds += time.monotonic() - waiting.since
            self._preemptions[key] = Preemption()
            self._watch(self._run_one(key, waiting.work))

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def _run_one(self, key: _Key, work: Slice) -> None:
        def progress(length: int) -> None:
            self._lengths[key] = length

        finished = preempted = False
        try:
            trajectory = await self.loop.run(
                work.problem,
                key[1],
                on_progress=progress,
                resume=work.parked.get(key[1]),
                preemption=self._preemptions[key],
            )
            finished = trajectory.usable
            self.scheduler.budget.settle(key, trajectory.length)
            preempted = (
                trajectory.finish_reason is None and not self.loop.parking and not self.loop.engine_gone
            )
        finally:
            del self._preemptions[key]
            self._lengths.pop(key, None)
            if not preempted:
                self.scheduler.budget.release(key, finished=finished)
            self._wake.set()
        if preempted:
            work.parked[key[1]] = trajectory
            self._waiting[key] = _Waiting(work, time.monotonic(), preempted=True)
            self.scheduler.requeue(self._admission(work, key[1]))
        else:
            await self._on_trajectory(work, trajectory)

    async def _hand_back(self, work: Slice, trajectory: Trajectory) -> None:
        """A parked trajectory for which the phase ends before it runs again."""
        if self.loop.cutting:
            trajectory.finish_reason = FinishReason.CUT
            await self.loop.tools.close(trajectory)
        self.loop.stats.finish(trajectory)
        await self._on_trajectory(work, trajectory)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    async def _cancel(self) -> None:
        futures: list[asyncio.Future[None] | asyncio.Future[list[Slice] | None]] = [
            *self._running,
            *self._preempting,
        ]
        if self._pull is not None:
            futures.append(self._pull)
        for future in futures:
            future.cancel()
        if futures:
            await asyncio.wait(futures)
        self.scheduler.withdraw()


def _unstarted(work: Slice, index: int) -> Trajectory:
    return Trajectory(query_id=work.problem.query_id, rollout_index=index, prompt_ids=[])
