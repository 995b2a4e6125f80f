"""Weights from the actor's rank 0 to every rollout worker, in buckets, over RLinf's broadcast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rlinf.scheduler import Worker

Bucket = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WeightRoute:
    """Who takes part in a weight sync."""

    actor_group: str
    rollout_group: str
    rollout_ranks: tuple[int, ...]
    bucket_bytes: int = 256 << 20

    @property
    def groups(self) -> list[tuple[str, list[int]]]:
        return [(self.actor_group, [0]), (self.rollout_group, list(self.rollout_ranks))]


def send_weights(
    worker: Worker, named_tensors: Iterator[tuple[str, torch.Tensor]], route: WeightRoute
) -> dict[str, float]:
    """Walk the actor's weights (collective over actor ranks) and broadcast them bucket by bucket from rank 0.

    An empty bucket ends the stream. Returns bytes sent and seconds.
    """
    start = time.perf_counter()
    sends = worker._rank == 0
    bucket: Bucket = {}
    size = total = 0
    for name, tensor in named_tensors:
        if not sends:
            continue  # the gather behind the iterator is collective, the broadcast is rank 0's
        # The engines load from host memory; a copy, because a CPU tensor may alias the live parameter.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += bucket[name].nbytes
        if size >= route.bucket_bytes:
            worker.broadcast(bucket, groups=route.groups)
            total += size
            bucket, size = {}, 0
    if sends:
        if bucket:
            worker.broadcast(bucket, groups=route.groups)
            total += size
        worker.broadcast({}, groups=route.groups)
    return {"bytes": float(total), "seconds": time.perf_counter() - start}


async def receive_weights(worker: Worker, route: WeightRoute) -> Bucket:
    """The rollout side of `send_weights`: all weights, on the host."""
    weights: Bucket = {}
    while True:
        work: Any = worker.broadcast(None, groups=route.groups, async_op=True)
        bucket = await work.async_wait()
        if not bucket:
            return weights
        weights.update(bucket)
