"""Small RLinf workers for the tests of calls and channels; a module of its own, because Ray pickles by name."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import torch
from rlinf.scheduler import Channel, Worker
from safetensors.torch import load_file

from rstar2_megatron.cluster import weights
from rstar2_megatron.cluster.weights import WeightSender, receive_weights
from rstar2_megatron.weights.checksum import weights_checksum
from rstar2_megatron.weights.route import Place, WeightRoute


def _tensors() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    tensors = [(f"layer.{i}.weight", torch.randn(100, 10 + i)) for i in range(7)]
    return [
        *tensors,
        ("half", torch.randn(33).bfloat16()),
        ("large", torch.randn(3, 5000)),
        ("strided", torch.randn(6, 4).t()),
    ]


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

    def place(self) -> Place:
        return Place(self._cluster_node_rank, tuple(self.global_accelerator_ids))

    def send(self, route: WeightRoute) -> tuple[dict[str, float], dict[str, int]]:
        """Figures of a sync of some tensors of several types and shapes, and their checksums."""
        tensors = _tensors()
        self._sender = WeightSender(self)
        return self._sender.send(iter(tensors), route), weights_checksum(tensors)

    def forget(self) -> None:
        self._sender.forget()

    def send_weights(self, route: WeightRoute) -> dict[str, float]:
        return self.send(route)[0]

    def forget_weights(self) -> None:
        self.forget()

    def weights_checksum(self) -> dict[str, int]:
        """Of what `send` sends."""
        return weights_checksum(_tensors())


class Receiver(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._hidden: str | None = None
        self._lost: str | None = None

    async def receive(self, route: WeightRoute) -> tuple[dict[str, int], int]:
        """Checksums of what arrived, and in how many buckets."""
        sums: dict[str, int] = {}
        count = 0
        flags = []
        async for bucket, last in receive_weights(self, route):
            flags.append(last)
            tensors = load_file(bucket.load()["path"])
            sums.update(weights_checksum(tensors.items()))
            bucket.close()
            count += 1
        assert flags == [False] * (count - 1) + [True]
        return sums, count

    async def place(self) -> Place:
        return Place(self._cluster_node_rank, tuple(self.global_accelerator_ids))

    def hide(self, prefix: str | None) -> None:
        """From now on paths that begin so cannot be opened here, as in a container of its own."""
        self._hidden = prefix

    async def receive_weights(self, route: WeightRoute, version: int) -> None:
        """Keep the checksums and the version."""
        original = weights.OpenedBucket

        def opened(path: str) -> weights.OpenedBucket:
            if self._hidden is not None and path.startswith(self._hidden):
                raise FileNotFoundError(f"{path} is not in this container")
            return original(path)

        weights.OpenedBucket = opened  # type: ignore[assignment,misc]
        try:
            sums, _ = await self.receive(route)
        finally:
            weights.OpenedBucket = original  # type: ignore[misc]
        if self._lost is not None:
            sums[self._lost] = 0
        self._held = (version, sums)

    def lose(self, name: str | None) -> None:
        """From now on this tensor never reaches the model."""
        self._lost = name

    async def held(self) -> tuple[int, dict[str, int]]:
        return self._held

    async def weights_checksum(self) -> dict[str, int]:
        return self._held[1]

    async def receive_elsewhere(self, route: WeightRoute) -> None:
        """Like a worker whose file system is another one."""
        original = weights.OpenedBucket
        weights.OpenedBucket = lambda path: original(f"/nowhere{path}")  # type: ignore[assignment,misc]
        try:
            async for _ in receive_weights(self, route):
                pass
        finally:
            weights.OpenedBucket = original  # type: ignore[misc]

    async def echo(self, channel: Channel) -> int:
        """Move items from key "in" to key "out" until None; returns how many."""
        count = 0
        while (item := await channel.get(key="in", async_op=True).async_wait()) is not None:
            await asyncio.sleep(0.01)
            await channel.put((self._rank, item), key="out", async_op=True).async_wait()
            count += 1
        return count
