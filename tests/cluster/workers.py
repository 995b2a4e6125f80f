"""Small RLinf workers for the tests of calls and channels; a module of its own, because Ray pickles by name."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import torch
from rlinf.scheduler import Channel, Worker

from rstar2_megatron.cluster.weights import WeightRoute, receive_weights, send_weights


class Sender(Worker):
    def __init__(self) -> None:
        super().__init__()

    def rank(self) -> int:
        return self._rank

    def fail_on(self, rank: int) -> str:
        """Raises on one rank; the others hang as in a collective with the failed one."""
        if self._rank == rank:
            raise ValueError(f"no luck on rank {rank}")
        time.sleep(30)
        return "slept"

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def send(self, route: WeightRoute) -> dict[str, float]:
        tensors = ((f"layer.{i}.weight", torch.full((100, 10), float(i))) for i in range(7))
        return send_weights(self, tensors, route)


class Receiver(Worker):
    def __init__(self) -> None:
        super().__init__()

    async def receive(self, route: WeightRoute) -> dict[str, float]:
        weights = await receive_weights(self, route)
        return {name: float(tensor.mean()) for name, tensor in weights.items()}

    async def echo(self, channel: Channel) -> int:
        """Move items from key "in" to key "out" until None; returns how many."""
        count = 0
        while (item := await channel.get(key="in", async_op=True).async_wait()) is not None:
            await asyncio.sleep(0.01)
            await channel.put((self._rank, item), key="out", async_op=True).async_wait()
            count += 1
        return count
