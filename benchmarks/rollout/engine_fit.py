"""The engine model's speeds, measured on real engines through their own interface."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import numpy as np

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.settings.planning.estimates import EngineSpeed

_PREFILL = ((1, 64), (1, 512), (8, 64), (8, 256))  # requests, tokens of each
_DECODE = ((1, 64), (1, 512), (8, 64), (8, 384), (24, 64), (24, 192))
_STEPS = 96


async def fit_speed(engines: Sequence[EngineClient]) -> EngineSpeed:
    """Least squares of measured times on what `EngineSpeed` is made of; nothing below zero. Takes seconds on a CPU.

    All engines do the same work together, because engines of one machine slow each other down; times are their mean.
    """
    fresh = itertools.count()

    async def timed(requests: int, prompt: int, steps: int) -> float:
        seconds = await asyncio.gather(*(timed_on(engine, requests, prompt, steps) for engine in engines))
        return sum(seconds) / len(seconds)

    async def timed_on(engine: EngineClient, requests: int, prompt: int, steps: int) -> float:
        await engine.flush_cache()
        sampling = {"temperature": 1.0, "max_new_tokens": steps, "ignore_eos": True}
        first = next(fresh)
        prompts = [[3 + (first * 31 + r * 7 + i * i) % 250 for i in range(prompt)] for r in range(requests)]
        start = time.monotonic()
        await asyncio.gather(*(engine.generate(ids, sampling, timeout_s=600) for ids in prompts))
        return time.monotonic() - start

    await timed(8, 64, 16)  # warm-up
    rows = [[1.0, requests * tokens] for requests, tokens in _PREFILL]
    times = [await timed(requests, tokens, 1) for requests, tokens in _PREFILL]
    base, per_token = _not_negative(rows, times)

    rows, times = [], []
    for requests, tokens in _DECODE:
        seconds = await timed(requests, tokens, _STEPS) - base - per_token * requests * tokens
        rows.append([1.0, requests, requests * (tokens + _STEPS / 2)])
        times.append(max(0.0, seconds) / _STEPS)
    decode_base, per_request, per_context = _not_negative(rows, times)
    return EngineSpeed(decode_base, per_request, per_context, base, per_token)


def _not_negative(rows: list[list[float]], times: list[float]) -> list[float]:
    """Least squares without columns that would come out negative."""
    matrix, target = np.array(rows), np.array(times)
    columns = list(range(matrix.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        if (solution >= 0).all() or len(columns) == 1:
            break
        columns.pop(int(np.argmin(solution)))
    result = [0.0] * matrix.shape[1]
    for column, value in zip(columns, solution, strict=True):
        result[column] = max(0.0, float(value))
    return result
