"""Rollout workers of tests. They load what a real one loads, SGLang's client and tokenizers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from rstar2_megatron.cluster.rollout_worker import RolloutWorker
from rstar2_megatron.rollout.engine.protocol import GenerateResult
from rstar2_megatron.rollout.token_store import TokenStore
from rstar2_megatron.trajectory import Trajectory
from rstar2_megatron.weights.route import Place, WeightRoute
from tests.cluster.weight_ends import as_on_gpus


class KillableEngine(RolloutWorker):
    """A rollout worker whose engine can be killed, also in the middle of a weight sync."""

    async def place(self) -> Place:
        return as_on_gpus(self)

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def pids(self) -> tuple[int, int]:
        """Of this process and of its engine."""
        return os.getpid(), self._engine.pid

    async def kill_engine(self) -> None:
        """SIGKILL, and wait until it is noticed."""
        os.kill(self._engine.pid, signal.SIGKILL)
        while not self._engine.lost:
            await asyncio.sleep(0.01)

    async def kill_at_request(self) -> None:
        """SIGKILL the engine at the next trajectory that generates in it, so that one is surely lost with it."""
        generate = self._engine.generate

        async def dies(*args: Any, **options: Any) -> GenerateResult:
            self._engine.generate = generate  # type: ignore[method-assign]
            os.kill(self._engine.pid, signal.SIGKILL)
            return await generate(*args, **options)

        self._engine.generate = dies  # type: ignore[method-assign]

    async def no_more_restarts(self) -> None:
        """The engine's next loss is final."""
        self._engine.settings.max_engine_restarts = 0

    def kill_at_bucket(self, number: int) -> None:
        self._kill_at = number

    async def deliver_weights(self, route: WeightRoute, sender: int, number: int, item: Any, last: bool) -> str:
        if number == getattr(self, "_kill_at", None):
            self._kill_at = None
            await self.kill_engine()
        return await super().deliver_weights(route, sender, number, item, last)

    async def recover(self) -> int:
        """Start the engine again with its weights; their version."""
        await self._engine.recover()
        return self._engine.weight_version


class TokenHolder(RolloutWorker):
    """A rollout worker that holds tokens as after a phase."""

    async def fill(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        self._store = TokenStore(self._rank)
        for trajectory in trajectories:
            self._store.keep(trajectory)
        return trajectories
