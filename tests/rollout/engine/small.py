"""Small engines for tests: their settings, weights into them, and the numbers that transformers has for their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import EngineReport
from rstar2_megatron.settings.schema import RolloutModelSettings, RolloutSettings
from rstar2_megatron.weights.bucket import buckets as in_buckets
from rstar2_megatron.weights.shared_memory import SharedBucket, WeightBucket

PROMPT = [5, 17, 33, 201, 7]
ENDLESS = {"max_new_tokens": 2500, "ignore_eos": True}
"""Of a request that runs until something ends it. Three fit into the cache; another one would wait."""


def settings_for(model: Path, **changes: Any) -> RolloutSettings:
    return RolloutSettings(
        model=RolloutModelSettings(model_path=str(model), precision="fp32"),
        **{"max_total_tokens": 8192, "max_running_requests": 16, "max_engine_restarts": 1, **changes},
    )


@dataclass
class SharedEngine:
    """The engine that tests share, and what its log said at its first report."""

    client: EngineClient
    log: Path
    first: tuple[EngineReport, str] | None = None

    def take_report(self, report: EngineReport) -> None:
        self.first = self.first or (report, self.log.read_text())


async def shared_engine(model: Path, log: Path) -> AsyncIterator[SharedEngine]:
    """Start it, and end it without leaving a process. It draws by the seeds of its requests, if they have any."""
    client = EngineClient(settings_for(model, request_seeds=True), seed=3, name="shared engine", log_path=log)
    shared = SharedEngine(client, log)
    client.on_report = shared.take_report
    await client.start()
    yield shared
    family = [psutil.Process(client.pid), *psutil.Process(client.pid).children(recursive=True)]
    await client.close()
    assert not psutil.wait_procs(family, timeout=60)[1]


def scheduler_of(engine: EngineClient) -> psutil.Process:
    """SGLang's scheduler, the largest of the engine's processes."""
    return max(psutil.Process(engine.pid).children(), key=lambda p: p.memory_info().rss)


async def kill_and_wait_until_lost(engine: EngineClient) -> None:
    scheduler_of(engine).kill()
    async with asyncio.timeout(60):
        while not engine.lost:
            await asyncio.sleep(0.05)


async def update_weights(
    engine: EngineClient, named_tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int = 512 << 20
) -> None:
    """Weights of a test into an engine, by the way that a weight sync takes."""

    async def buckets() -> AsyncIterator[tuple[WeightBucket, bool]]:
        for bucket, last in in_buckets(named_tensors, bucket_bytes):
            yield SharedBucket(bucket), last

    await engine.update_weights(buckets(), version)


def hf_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """Log-prob of each token of `response` after `prompt`, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
    predicted: Tensor = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return predicted.gather(1, torch.tensor(response)[:, None]).squeeze(1)


def named_files(pid: int) -> set[str]:
    """Files in /dev/shm that the processes of an engine have mapped and that still have a name."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    maps = [line for p in family for line in Path(f"/proc/{p.pid}/maps").read_text().splitlines()]
    mapped = {line.partition("/dev/shm/")[2] for line in maps if "/dev/shm/sgl" in line}
    assert mapped, "SGLang no longer keeps files there"
    return {name for name in mapped if not name.endswith("(deleted)")}
