"""Grades trajectories as they end, while the engines generate others."""

from __future__ import annotations

import asyncio
import time

from rlinf.scheduler import Channel, Worker

from rstar2_megatron.cluster.channel import ENDED, TO_DRIVER, Outbox, pack, unpack
from rstar2_megatron.cluster.tracing import TracedWorker
from rstar2_megatron.records.trace import GRADING, TRACE, TraceRow
from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.rollout.messages import RolloutResult
from rstar2_megatron.settings.schema import RewardSettings


class RewardWorker(TracedWorker, Worker):
    def __init__(self, settings: RewardSettings) -> None:
        super().__init__()
        self._rewards = Rewards(settings)

    def trace_row(self) -> TraceRow:
        return GRADING

    async def serve(self, channel: Channel) -> None:
        """Grade trajectories from ENDED and send them to TO_DRIVER, until a None arrives.

        Messages are graded concurrently, so a slow grading does not delay others. An exception of the grading ends the loop at
        once, also while no message arrives.
        """
        outbox = Outbox(lambda items: channel.put(pack(items), key=TO_DRIVER, async_op=True).async_wait())

        async def handle(ended: list[RolloutResult]) -> None:
            start = time.perf_counter()
            with TRACE.span("grade", GRADING, trajectories=len(ended)):
                await self._rewards.grade([(item.problem, item.trajectory) for item in ended if item.trajectory.usable])
            took = time.perf_counter() - start
            for item in ended:
                item.grading_s = took
                outbox.add(item)

        try:
            async with asyncio.TaskGroup() as grading:
                message: bytes | None
                while (message := await channel.get(key=ENDED, async_op=True).async_wait()) is not None:
                    grading.create_task(handle(unpack(message)))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the driver knows it by its own type
        await outbox.flush()

    def shutdown(self) -> None:
        self._rewards.close()
