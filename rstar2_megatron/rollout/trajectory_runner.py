"""Keeps one engine busy: requests slices when the KV budget has room, runs their trajectories, parks them on request.

Every trajectory has its own deadline, and requests for work run concurrently with the rollouts, so nothing can hang.
"""

from __future__ import annotations

import asyncio
import faulthandler
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rstar2_megatron.records.trace import TRACE
from rstar2_megatron.rollout.agent_loop import AgentLoop, Preemption
from rstar2_megatron.rollout.engine.protocol import EngineLost, EngineReport
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue, WaitingTrajectory
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.trajectory import FinishReason, Trajectory

NextWork = Callable[[int], Awaitable[list[Slice] | None]]
OnTrajectory = Callable[[Slice, Trajectory], Awaitable[None]]
OnEngineGone = Callable[[str], Awaitable[None]]

_Key = tuple[int, int]  # group, rollout index
_HELD_S = 60.0
"""After which the log shows where async code of the user holds up the event loop, which no deadline can interrupt."""


class TrajectoryRunner:
    """One phase of one engine. `run` returns when `next_work` has returned None and every trajectory has ended.

    `next_work` gets an estimate of how many trajectories fit and returns slices. `on_trajectory` is awaited for each
    trajectory that ends or is parked, so grading overlaps generation. An exception of either callback ends the run.
    So does a trajectory that can never fit the engine (ValueError).

    When the engine is lost for good, `on_engine_gone` gets the reason and no more work is requested. Every unfinished
    trajectory goes to `on_trajectory` without a finish reason, so that another engine can continue it. Without this
    callback the run ends with EngineLost.
    """

    def __init__(
        self,
        loop: AgentLoop,
        queue: AdmissionQueue,
        next_work: NextWork,
        on_trajectory: OnTrajectory,
        on_engine_gone: OnEngineGone | None = None,
    ) -> None:
        self.loop = loop
        self.queue = queue
        self._next_work = next_work
        self._on_trajectory = on_trajectory
        self._on_engine_gone = on_engine_gone
        self._tasks: set[asyncio.Task[None]] = set()  # trajectories, a request for work
        self._preemptions: dict[_Key, Preemption] = {}  # by running trajectory
        self._lengths: dict[_Key, int] = {}  # last known lengths of running trajectories, in tokens
        self.responses: dict[_Key, int] = {}
        """Response tokens so far of each running trajectory."""
        self.response_tokens = 0
        """Response tokens of this phase so far."""
        self._asking = False  # a request for work is under way
        self._no_more = False
        self._gave_back = False
        self._reported_capacity = 0  # tokens of KV cache in the engine's last report
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._evictions_seen = loop.stats.retractions

    async def run(self) -> None:
        self._still_runs()
        try:
            while True:
                if self.loop.engine_gone:
                    await self._give_back()
                else:
                    self._start_what_fits()
                    self._ask_for_work()
                if not self._tasks:
                    return
                self._wake.clear()
                await self._wake.wait()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._next_sign.cancel()
            faulthandler.cancel_dump_traceback_later()
            await self._cancel()

    def _still_runs(self) -> None:
        faulthandler.dump_traceback_later(_HELD_S, file=2)  # into the log, unless the event loop comes here again before
        self._next_sign = asyncio.get_running_loop().call_later(_HELD_S / 4, self._still_runs)

    @property
    def num_at_tool(self) -> int:
        """Running trajectories that wait for a tool call."""
        return sum(preemption.at_tool for preemption in self._preemptions.values())

    async def park(self, *, cut: bool) -> None:
        """End the phase now. Running trajectories go unfinished to `on_trajectory`, after any running tool call.

        With `cut` they end as CUT; otherwise a later phase resumes them. Trajectories that were preempted or carried go
        to `on_trajectory` unchanged. Trajectories that never started are dropped.
        """
        self._no_more = True
        self.loop.parking, self.loop.cutting = True, cut
        for waiting in self.queue.withdraw():
            if parked := waiting.work.parked.get(waiting.key[1]):  # preempted, or carried and not restarted yet
                await self._hand_back(waiting.work, parked)
        self.loop.engine.abort_all()  # waits for no answer: an engine that gives none would hold the phase's end

    async def _give_back(self) -> None:
        """Return all waiting work after the engine's loss. Each running trajectory is returned when it sees the loss."""
        if not self._gave_back:
            self._gave_back = self._no_more = True
            if self._on_engine_gone is None:
                raise EngineLost(self.loop.engine_gone)
            await self._on_engine_gone(self.loop.engine_gone)
        for waiting in self.queue.withdraw():
            work, index = waiting.work, waiting.key[1]
            await self._hand_back(work, work.parked.get(index) or Trajectory(work.problem.query_id, index))

    def observe(self, report: EngineReport) -> None:
        """Pass an engine report on: lengths and evictions to the budget, the load to the statistics."""
        stats = self.loop.stats
        stats.observe(report)
        TRACE.counter("KV tokens", used=report.used_tokens, capacity=report.max_total_tokens)
        TRACE.counter("requests", running=report.running_requests, waiting=report.waiting_requests)
        if self._reported_capacity not in (0, report.max_total_tokens):
            # a restarted engine may have found another amount of free memory
            self.queue.budget.capacity_tokens = report.max_total_tokens
        self._reported_capacity = report.max_total_tokens
        self.queue.budget.observe(
            stats.retractions - self._evictions_seen,
            self._lengths,
            report.used_tokens,
            [key for key, preemption in self._preemptions.items() if preemption.at_tool],
        )
        self._evictions_seen = stats.retractions
        for key in self.queue.budget.preempt():
            assert isinstance(key, tuple)
            self.loop.preempt(self._preemptions[key])
        self._wake.set()  # the budget may have room now

    # ------------------------------------------------------------------------------------------- work

    def _ask_for_work(self) -> None:
        if not self._asking and not self._no_more and self.queue.wants_work():
            self._asking = True
            self._watch(self._get_work(self.queue.budget.room()))

    async def _get_work(self, room: int) -> None:
        try:
            work = await self._next_work(room)
        finally:
            self._asking = False
        if work is None:
            self._no_more = True
        elif not self.loop.parking:
            for one in work:
                prompt_tokens = self._prompt_tokens(one)
                self.queue.add([self._waiting(one, index, prompt_tokens) for index in one.indices])
        else:  # too late: the phase is ending; carried trajectories stay carried
            for one in work:
                for trajectory in one.parked.values():
                    await self._hand_back(one, trajectory)

    def _prompt_tokens(self, work: Slice) -> int:
        return len(self.loop.template.prompt_ids(work.problem))

    def _waiting(self, work: Slice, index: int, prompt_tokens: int) -> WaitingTrajectory:
        max_tokens = prompt_tokens + max(1, self.loop.response_budget(prompt_tokens))
        parked = work.parked.get(index)
        length = max(parked.length, prompt_tokens) if parked else prompt_tokens
        return WaitingTrajectory((work.group, index), work.group, prompt_tokens, max_tokens, length, work, time.monotonic())

    def _start_what_fits(self) -> None:
        for admitted in self.queue.admit():
            self.loop.stats.admission_seconds += time.monotonic() - admitted.since
            self._preemptions[admitted.key] = Preemption()
            parked = admitted.work.parked.get(admitted.key[1])
            self.responses[admitted.key] = parked.response_tokens if parked else 0
            self._watch(self._run_one(admitted.key, admitted.work))

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _run_one(self, key: _Key, work: Slice) -> None:
        def progress(prompt_tokens: int, response_tokens: int) -> None:
            self._lengths[key] = prompt_tokens + response_tokens
            self.response_tokens += response_tokens - self.responses[key]
            self.responses[key] = response_tokens

        finished = preempted = False
        try:
            with TRACE.task(f"{work.problem.query_id}#{key[1]}") as span:
                trajectory = await self.loop.run(
                    work.problem,
                    key[1],
                    on_progress=progress,
                    resume=work.parked.get(key[1]),
                    preemption=self._preemptions[key],
                    number=work.number,
                )
                span.update(tokens=trajectory.length, ended=str(trajectory.finish_reason or "parked"))
            finished = trajectory.usable
            self.queue.budget.set_length(key, trajectory.length)
            preempted = trajectory.finish_reason is None and not self.loop.parking and not self.loop.engine_gone
        finally:
            del self._preemptions[key]
            self._lengths.pop(key, None)
            del self.responses[key]
            if not preempted:
                self.queue.budget.release(key, finished=finished)
            self._wake.set()
        if preempted:
            work.parked[key[1]] = trajectory  # with its tokens
            self.queue.requeue(self._waiting(work, key[1], self._prompt_tokens(work)))
        else:
            await self._on_trajectory(work, trajectory)

    async def _hand_back(self, work: Slice, trajectory: Trajectory) -> None:
        """Return a parked trajectory that does not run again in this phase."""
        if self.loop.cutting:
            trajectory.finish_reason = FinishReason.CUT
            await self.loop.tools.close(trajectory)
        self.loop.stats.finish(trajectory)
        await self._on_trajectory(work, trajectory)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.queue.withdraw()
