"""Programs that run one engine: start, greedy tokens, memory given back, decoding speed."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost
from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.settings.schema import RolloutSettings
from rstar2_megatron.weights.shared_memory import OpenedBucket

_CALL_S = 60.0
_ODD_REQUESTS = 13


def engine_run(job: Job, settings: RolloutSettings, **sizes: int) -> dict[str, Any]:
    """All that is asked of one engine (`_engine_run`): starting it takes longest, so it is started once."""
    return asyncio.run(_engine_run(job, settings, **sizes))


async def _engine_run(
    job: Job, settings: RolloutSettings, vocab_size: int, context_length: int, tokens: int, requests: int, speed_tokens: int
) -> dict[str, Any]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    engine = EngineClient(settings, name="engine", max_context_tokens=context_length, memory_saver=True)
    idle = free_bytes(job)
    started = time.perf_counter()
    try:
        await engine.start()
        result: dict[str, Any] = {
            "start_seconds": time.perf_counter() - started,
            "kv_tokens": engine.kv_capacity_tokens,
            "used_bytes": idle - free_bytes(job),
        }
        greedy = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        first = prompt(16)
        answer = await engine.generate(first, greedy, timeout_s=_CALL_S)
        result["prompt"], result["token_ids"] = first, answer.token_ids.tolist()
        result["logprobs"] = answer.logprobs.tolist()

        sampling = {"temperature": 1.0, "max_new_tokens": speed_tokens, "ignore_eos": True}
        prompts = [prompt(32) for _ in range(requests)]
        started = time.perf_counter()
        answers = await asyncio.gather(*(engine.generate(ids, sampling, timeout_s=_CALL_S) for ids in prompts))
        generated = sum(len(answer.token_ids) for answer in answers)
        result["decode_tokens_per_s"] = generated / (time.perf_counter() - started)

        awake = free_bytes(job)
        started = time.perf_counter()
        await engine.release_memory()
        asleep = free_bytes(job)
        result["sleep_seconds"] = time.perf_counter() - started
        refused = await _refused(engine, first, greedy)
        started = time.perf_counter()
        await engine.resume_memory()
        result["wake_seconds"] = time.perf_counter() - started
        result |= {"freed_bytes": asleep - awake, "taken_again_bytes": asleep - free_bytes(job), "refused_asleep": refused}
        await engine.update_weights(_files_of(settings.model.model_path), version=1)
        # CUDA graphs are captured for other numbers of requests, so the unused places of a batch are computed too
        again = await asyncio.gather(*(engine.generate(first, greedy, timeout_s=_CALL_S) for _ in range(_ODD_REQUESTS)))
        result["awake_difference"] = max(
            difference(result["token_ids"], result["logprobs"], other.token_ids.tolist(), other.logprobs.tolist())
            for other in again
        )
        return result
    finally:
        await engine.close()


async def _files_of(model: str) -> AsyncIterator[tuple[OpenedBucket, bool]]:
    files = sorted(Path(model).glob("*.safetensors"))
    for file in files:
        yield OpenedBucket(str(file)), file == files[-1]


def difference(tokens: list[int], logprobs: list[float], other_tokens: list[int], other_logprobs: list[float]) -> float:
    """Mean |log-prob difference| of two greedy answers, up to and with the first token in which they differ.

    Of two tokens that are nearly as probable rounding chooses either, and their log-probs agree. Behind them the answers
    continue other texts.
    """
    same = next((n for n, (a, b) in enumerate(zip(tokens, other_tokens)) if a != b), len(tokens))
    pairs = list(zip(logprobs[: same + 1], other_logprobs[: same + 1]))
    return sum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else math.inf


async def _refused(engine: Any, prompt: list[int], sampling: dict[str, Any]) -> bool:
    """Whether an engine that gave its memory back refuses to generate."""
    try:
        await engine.generate(prompt, sampling, timeout_s=_CALL_S)
    except (EngineError, EngineLost):
        return True
    return False


def free_bytes(job: Job) -> int:
    """Free memory over the devices of this process; 0 on a CPU, where an engine frees nothing."""
    if job.device == "cpu":
        return 0
    return sum(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))
