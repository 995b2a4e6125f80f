"""Grades trajectories as groups arrive from the rollout workers."""

from __future__ import annotations

import time

from rlinf.scheduler import Channel, Worker

from rstar2_megatron.cluster.keys import GRADED, GROUPS
from rstar2_megatron.reward.grade import grade_trajectories
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.settings.schema import RewardSettings
from rstar2_megatron.trajectory import Group


class RewardWorker(Worker):
    def __init__(self, settings: RewardSettings) -> None:
        super().__init__()
        self._pool = GraderPool(settings.num_workers, settings.timeout_s, mode=settings.mode)

    def ready(self) -> bool:
        return True

    async def serve(self, channel: Channel) -> dict[str, float]:
        """Grade groups from GROUPS to GRADED until a None arrives. Returns counts and seconds spent."""
        groups = 0
        seconds = 0.0
        while True:
            group: Group | None = await channel.get(key=GROUPS, async_op=True).async_wait()
            if group is None:
                return {"groups": float(groups), "seconds": seconds}
            start = time.perf_counter()
            await grade_trajectories(self._pool, group.problem, group.usable)
            seconds += time.perf_counter() - start
            groups += 1
            await channel.put(group, key=GRADED, async_op=True).async_wait()

    def shutdown(self) -> None:
        self._pool.close()
