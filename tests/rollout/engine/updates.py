"""Weights of a test into an engine, by the way that a weight sync takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from torch import Tensor

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.weights.shared_memory import SharedBucket, WeightBucket, group_tensors


async def update_weights(
    engine: EngineClient, named_tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int = 512 << 20
) -> None:
    async def buckets() -> AsyncIterator[tuple[WeightBucket, bool]]:
        for tensors, last in group_tensors(named_tensors, bucket_bytes):
            yield SharedBucket(tensors), last

    await engine.update_weights(buckets(), version)
