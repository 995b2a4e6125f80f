"""Seeds of single requests, and a real engine with `rollout.request_seeds`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rstar2_megatron.rollout.agent_loop import Preemption
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import INTERRUPTED, GenerateResult
from rstar2_megatron.rollout.engine.seeds import request_seed
from tests.rollout.engine.small import PROMPT, update_weights
from tests.rollout.written import ANSWER, PROBLEM, InterruptedEngine, call, make_loop


def test_every_place_has_a_seed_of_its_own() -> None:
    places = [
        (run, number, query, rollout, turn)
        for run in (0, 1)
        for number in (0, 1, 11)
        for query in ("a", "a1")
        for rollout in (0, 1, 11)
        for turn in (0, 1)
    ]
    seeds = {request_seed(*place) for place in places}
    assert len(seeds) == len(places) and all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(3, 7, "q", 2, 1) == 1236574906  # a resumed run, and another machine, draw the same


class SeedsSeen(InterruptedEngine):
    async def generate(self, input_ids: Any, sampling: dict[str, Any], **about: Any) -> GenerateResult:
        self.seeds = [*getattr(self, "seeds", []), sampling.get("sampling_seed")]
        return await super().generate(input_ids, sampling, **about)


async def test_a_turn_keeps_its_seed_when_it_is_interrupted(tokenizer) -> None:
    loop = make_loop(tokenizer, [call(), ANSWER])
    loop.seed = 5
    engine = SeedsSeen(tokenizer, [call(), ANSWER], cuts=[3])
    loop.engine = engine
    await loop.run(PROBLEM, 2, number=9)
    first, second = (request_seed(5, 9, PROBLEM.query_id, 2, turn) for turn in (0, 1))
    assert engine.seeds == [first, first, second]


async def test_without_a_seed_the_engine_draws_by_its_own(tokenizer) -> None:
    loop = make_loop(tokenizer, [ANSWER])
    engine = SeedsSeen(tokenizer, [ANSWER])
    loop.engine = engine
    await asyncio.wait_for(loop.run(PROBLEM, 0, preemption=Preemption()), 20)
    assert engine.seeds == [None]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_request_draws_the_same_alone_in_company_and_interrupted(engine: EngineClient, memorised_model: Path) -> None:
    """Interrupted by an update to the weights that the engine has."""
    heard = asyncio.Event()

    def generate(rollout: int, prompt: list[int], count: int) -> Any:
        seed = request_seed(0, 1, "q", rollout, 0)
        sampling = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True, "sampling_seed": seed}
        return engine.generate(prompt, sampling, timeout_s=120, on_tokens=lambda tokens: heard.set() if tokens else None)

    async def continued(prompt: list[int], count: int) -> tuple[list[int], int]:
        """Tokens, and how often they were interrupted."""
        tokens: list[int] = []
        times = 0
        while len(tokens) < count:
            async with asyncio.timeout(60):
                await engine.wait_until_ready()
            result = await generate(0, [*prompt, *tokens], count - len(tokens))
            tokens += result.token_ids.tolist()
            times += result.finish_reason == INTERRUPTED
        return tokens, times

    alone = (await generate(0, PROMPT, 24)).token_ids.tolist()
    several = await asyncio.gather(*(generate(rollout, PROMPT, 24) for rollout in range(4)))
    assert several[0].token_ids.tolist() == alone
    assert len({tuple(result.token_ids.tolist()) for result in several}) == 4
    whole = (await generate(0, PROMPT, 1500)).token_ids.tolist()
    assert whole[:24] == alone
    heard.clear()
    going_on = asyncio.create_task(continued(PROMPT, 1500))
    await asyncio.wait_for(heard.wait(), 60)
    weights = load_file(memorised_model / "model.safetensors")
    await update_weights(engine, weights.items(), engine.weight_version + 1)
    tokens, times = await going_on
    assert times == 1 and tokens[:24] == alone
    # a context that is computed at once may differ from one computed token by token in the last bits of its logits
    same = next((i for i, (a, b) in enumerate(zip(tokens, whole, strict=True)) if a != b), len(whole))
    assert same > 24
