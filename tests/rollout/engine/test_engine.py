"""The real SGLang engine in its own process: numbers, weights, deadlines, faults."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import INTERRUPTED, EngineError, EngineLost, GenerateResult, GenerationTimeout
from rstar2_megatron.settings.schema import ProfilerSettings
from rstar2_megatron.weights.bucket import buckets as in_buckets
from rstar2_megatron.weights.checksum import weights_checksum
from rstar2_megatron.weights.shared_memory import SharedBucket, WeightBucket
from tests.rollout.engine.small import (
    ENDLESS,
    PROMPT,
    SharedEngine,
    hf_logprobs,
    kill_and_wait_until_lost,
    named_files,
    scheduler_of,
    update_weights,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]
STOP = {"temperature": 1.0, "max_new_tokens": 16}
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights(memorised_model: Path) -> Weights:
    return load_file(memorised_model / "model.safetensors")


def times(weights: Weights, factor: float) -> Weights:
    return {name: tensor * factor for name, tensor in weights.items()}


def version_of(result: GenerateResult) -> int:
    """The weight version of its last tokens."""
    return result.version_spans[-1][2]


async def running(
    engine: EngineClient, prompts: list[list[int]], sampling: dict[str, Any] = ENDLESS
) -> list[asyncio.Task[GenerateResult]]:
    """Requests of which the engine has generated the first tokens."""
    begun: set[int] = set()

    def heard(number: int) -> Callable[[int], None]:
        return lambda tokens: begun.add(number) if tokens else None

    tasks = [
        asyncio.create_task(engine.generate(prompt, sampling, timeout_s=120, on_tokens=heard(number)))
        for number, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(60):
        while len(begun) < len(prompts):
            await asyncio.sleep(0.01)
    return tasks


async def test_an_engine_has_generated_before_its_first_report_and_kept_nothing(shared_engine: SharedEngine) -> None:
    """It compiles its kernels before it serves: at their first use, in the time of the start."""
    assert shared_engine.first is not None
    report, log = shared_engine.first
    assert re.search(r"^warm-up: 3 requests in [\d.]+ s$", log, re.MULTILINE)
    assert report.used_tokens == 0 and report.generated == {}
    assert report.max_total_tokens == shared_engine.client.kv_capacity_tokens == 8192


async def test_logprobs_of_concurrent_turns_are_the_models(engine: EngineClient, memorised_model: Path) -> None:
    """Many requests of all lengths, joined and left at different times, with cached prefixes from earlier turns."""
    model = AutoModelForCausalLM.from_pretrained(memorised_model, dtype=torch.float32).eval()

    async def converse(i: int) -> list[tuple[list[int], list[int], list[float]]]:
        ids, turns = [(7 * i + j) % 400 for j in range(20 + 3 * i)], []
        for turn in range(2):
            result = await engine.generate(ids, {"temperature": 1.0, "max_new_tokens": 5 + 7 * i}, timeout_s=120)
            tokens = result.token_ids.tolist()
            turns.append((ids, tokens, result.logprobs.tolist()))
            ids = [*ids, *tokens, i, turn, 9]
        return turns

    done = await asyncio.gather(*(converse(i) for i in range(24)))
    worst = max(
        float((hf_logprobs(model, ids, tokens) - torch.tensor(logprobs)).abs().max())
        for turns in done
        for ids, tokens, logprobs in turns
    )
    assert worst < 1e-3


async def test_temperature_is_in_the_logprobs(engine: EngineClient, memorised_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(memorised_model, dtype=torch.float32).eval()
    result = await engine.generate(PROMPT, {"temperature": 0.5, "max_new_tokens": 8}, timeout_s=60)
    expected = hf_logprobs(model, PROMPT, result.token_ids.tolist(), temperature=0.5)
    assert torch.allclose(expected, torch.tensor(result.logprobs), atol=1e-3)


async def test_stop_token_is_returned_and_ends_the_turn(engine: EngineClient) -> None:
    free = await engine.generate(PROMPT, GREEDY, timeout_s=60)
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    generated = free.token_ids.tolist()
    stop = generated[4]
    cut = await engine.generate(PROMPT, {**GREEDY, "ignore_eos": False, "stop_token_ids": [stop]}, timeout_s=60)
    assert cut.finish_reason == "stop"
    assert cut.token_ids.tolist() == generated[: generated.index(stop) + 1]
    assert len(cut.logprobs) == len(cut.token_ids)


async def test_prefix_is_cached_and_flushed(engine: EngineClient) -> None:
    prompt = list(range(100, 180))
    await engine.generate(prompt, STOP, timeout_s=60)
    assert (await engine.generate(prompt, STOP, timeout_s=60)).cached_tokens >= 70
    await engine.flush_cache()
    assert (await engine.generate(prompt, STOP, timeout_s=60)).cached_tokens == 0


async def test_an_engine_that_serves_has_no_named_files(engine: EngineClient) -> None:
    assert named_files(engine.pid) == set()


async def test_a_request_too_long_is_refused_and_the_engine_lives(engine: EngineClient) -> None:
    with pytest.raises(EngineError):
        await engine.generate([1] * 5000, STOP, timeout_s=60)  # the model takes 4,096
    assert len((await engine.generate(PROMPT, STOP, timeout_s=60)).token_ids)


async def test_deadline_aborts_the_request_only(engine: EngineClient) -> None:
    with pytest.raises(GenerationTimeout):
        await engine.generate(PROMPT, ENDLESS, timeout_s=0.3)
    assert not engine.lost
    assert len((await engine.generate(PROMPT, STOP, timeout_s=60)).token_ids) <= 16


async def test_abort_all_gives_back_what_there_is(engine: EngineClient) -> None:
    tasks = await running(engine, [[i, 2, 3] for i in range(3)])
    engine.abort_all()
    results = await asyncio.gather(*tasks)
    assert {r.finish_reason for r in results} == {"abort"}
    assert all(0 < len(r.logprobs) == len(r.token_ids) < ENDLESS["max_new_tokens"] for r in results)


async def test_weights_are_the_files(engine: EngineClient, weights: Weights) -> None:
    assert await engine.weights_checksum() == weights_checksum(weights.items())


async def test_update_changes_outputs_version_and_checksums(engine: EngineClient, weights: Weights) -> None:
    before = await engine.generate(PROMPT, GREEDY, timeout_s=60)
    torch.manual_seed(1)
    changed = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in weights.items()}
    version = engine.weight_version + 5
    await update_weights(engine, changed.items(), version, bucket_bytes=40_000)  # several
    assert await engine.weights_checksum() == weights_checksum(changed.items())
    after = await engine.generate(PROMPT, GREEDY, timeout_s=60)
    assert after.token_ids.tolist() != before.token_ids.tolist()
    assert (version_of(before), version_of(after)) == (version - 5, version)
    assert after.cached_tokens == 0

    await update_weights(engine, weights.items(), version + 1)
    assert (await engine.generate(PROMPT, GREEDY, timeout_s=60)).token_ids.tolist() == before.token_ids.tolist()


async def test_an_update_interrupts_running_requests_which_go_on_with_the_new_weights(
    engine: EngineClient, weights: Weights
) -> None:
    """Requests that run, and those that reach the engine at the moment of the update; each token has its version."""
    tasks = await running(engine, [[number, 2, 3] for number in range(2)])
    late = asyncio.create_task(engine.generate([9, 2, 3], ENDLESS, timeout_s=120))
    await asyncio.sleep(0)
    version = engine.weight_version + 1
    await asyncio.wait_for(update_weights(engine, times(weights, 1.02).items(), version), 60)
    results = await asyncio.gather(*tasks, late)
    assert {r.finish_reason for r in results} == {INTERRUPTED}
    counts = [(len(r.token_ids), len(r.logprobs)) for r in results]
    assert all(0 < ids == logprobs < ENDLESS["max_new_tokens"] for ids, logprobs in counts[:2]), counts
    assert results[0].version_spans[-1][2] == version - 1
    after = await engine.generate([0, 2, 3, *results[0].token_ids.tolist()], STOP, timeout_s=60)
    assert {version for *_, version in after.version_spans} == {version}
    assert after.cached_tokens == 0  # nothing of the old weights is left


async def test_bad_weights_are_refused_and_good_ones_mend_it(engine: EngineClient, weights: Weights) -> None:
    version = engine.weight_version + 1
    with pytest.raises(EngineError):
        await update_weights(engine, [("model.norm.weight", torch.zeros(3))], version)
    with pytest.raises(EngineLost, match="weights"):  # never generate from half an update
        await engine.generate(PROMPT, STOP, timeout_s=60)
    waiting = asyncio.create_task(engine.wait_until_ready())  # as a trajectory does, until another update succeeds
    with pytest.raises(ValueError, match="no weights"):
        await update_weights(engine, [], version)
    await asyncio.sleep(0)
    assert not waiting.done()
    await update_weights(engine, weights.items(), version + 1)
    await asyncio.wait_for(waiting, 60)
    assert version_of(await engine.generate(PROMPT, STOP, timeout_s=60)) == version + 1


async def test_memory_is_released_and_taken_again(engine: EngineClient, weights: Weights) -> None:
    """The order of a collocated step. A CPU frees nothing; the states and SGLang's own calls are the GPU's."""
    version = engine.weight_version + 1
    tasks = await running(engine, [PROMPT])
    with pytest.raises(EngineError, match="1 calls under way"):
        await engine.release_memory()
    engine.abort_all()
    await asyncio.gather(*tasks)

    await engine.release_memory()
    await engine.release_memory()  # twice is once
    with pytest.raises(EngineError, match="resume_memory first"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    with pytest.raises(EngineError, match="resume_memory first"):
        await update_weights(engine, weights.items(), version)
    await engine.resume_memory(["weights"])
    await update_weights(engine, weights.items(), version)
    with pytest.raises(EngineError, match="kv_cache"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    await engine.resume_memory(["kv_cache"])
    assert version_of(await engine.generate(PROMPT, STOP, timeout_s=60)) == version
    assert await engine.weights_checksum() == weights_checksum(weights.items())

    await engine.release_memory()  # weights that nobody sent again are not there
    await engine.resume_memory()
    with pytest.raises(EngineLost, match="weights"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    await update_weights(engine, weights.items(), version + 1)


@pytest.mark.parametrize("moment", ["the process starts", "kept weights go in"])
async def test_an_update_that_finds_a_restart_under_way(
    engine: EngineClient, weights: Weights, moment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has the update's weights afterwards, and no request sees others. A profile that begins then is no failure."""
    version, restarts = engine.weight_version + 1, engine.restarts
    await update_weights(engine, times(weights, 1.01).items(), version)
    await kill_and_wait_until_lost(engine)
    recovering = asyncio.create_task(engine.recover())
    async with asyncio.timeout(120):
        while engine.lost or (moment == "kept weights go in" and not engine.kv_capacity_tokens):
            await asyncio.sleep(0.001)
    if moment == "the process starts":
        await engine.start_profile(ProfilerSettings(), str(tmp_path), "profile")
        assert "records no profile: " in caplog.text and "is still starting" in caplog.text
    changed = times(weights, 1.02)
    updating = asyncio.create_task(update_weights(engine, changed.items(), version + 1))
    await asyncio.sleep(0)
    assert not recovering.done()
    assert await ask_until_over(engine, updating) == {version + 1}
    await recovering
    assert await engine.weights_checksum() == weights_checksum(changed.items())
    assert engine.restarts == restarts + 1


async def test_an_engine_that_restarts_between_two_buckets_gets_both(engine: EngineClient, weights: Weights) -> None:
    changed, version, loaded, go_on = times(weights, 1.03), engine.weight_version + 1, asyncio.Event(), asyncio.Event()
    half = sum(tensor.nbytes for tensor in weights.values()) // 2

    async def stream() -> AsyncIterator[tuple[WeightBucket, bool]]:
        for bucket, last in in_buckets(changed.items(), half):
            yield SharedBucket(bucket), last
            loaded.set()
            await go_on.wait()

    updating = asyncio.create_task(engine.update_weights(stream(), version))
    await asyncio.wait_for(loaded.wait(), 60)
    await kill_and_wait_until_lost(engine)
    recovering = asyncio.create_task(engine.recover())  # as a trajectory does, whose request has failed
    async with asyncio.timeout(120):
        while engine.lost or not engine.kv_capacity_tokens:  # until it runs again
            await asyncio.sleep(0.05)
    assert not updating.done()
    go_on.set()
    await updating
    await recovering
    assert await engine.weights_checksum() == weights_checksum(changed.items())


async def test_killed_while_its_memory_is_released_or_taken_again(engine: EngineClient, weights: Weights) -> None:
    """A dead engine holds no memory, and the step goes on; it starts again where the next step needs it."""
    version, restarts = engine.weight_version + 1, engine.restarts
    scheduler_of(engine).kill()
    await engine.release_memory()
    assert engine.lost
    await engine.resume_memory(["weights"])
    await update_weights(engine, weights.items(), version)
    await engine.resume_memory(["kv_cache"])
    assert version_of(await engine.generate(PROMPT, STOP, timeout_s=60)) == version

    await engine.release_memory()
    scheduler_of(engine).kill()
    await engine.resume_memory(["weights"])
    assert engine.lost
    await update_weights(engine, times(weights, 1.01).items(), version + 1)
    await engine.resume_memory(["kv_cache"])
    assert version_of(await engine.generate(PROMPT, STOP, timeout_s=60)) == version + 1
    assert engine.restarts == restarts + 2


async def test_idle_engine_sleeps(engine: EngineClient) -> None:
    family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]

    def busy() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in family)

    await engine.flush_cache()  # which waits for an idle scheduler
    started, before = time.monotonic(), busy()
    await asyncio.sleep(2)
    assert busy() - before < 0.2 * (time.monotonic() - started), "a scheduler that spins takes a whole core"


async def ask_until_over(engine: EngineClient, change: asyncio.Task[None]) -> set[int]:
    """Weight versions of requests that were made at every moment of a change."""

    async def ask() -> int:
        async with asyncio.timeout(120):
            await engine.wait_until_ready()
        return version_of(await engine.generate(PROMPT, STOP, timeout_s=60))

    asking = []
    while not change.done():
        asking.append(asyncio.create_task(ask()))
        await asyncio.sleep(0.0 if len(asking) < 50 else 0.2)
    await change
    return set(await asyncio.gather(*asking))


async def test_a_request_in_the_middle_of_an_update_waits_for_its_weights(engine: EngineClient, weights: Weights) -> None:
    version = engine.weight_version + 1
    updating = asyncio.create_task(update_weights(engine, times(weights, 1.01).items(), version))
    await asyncio.sleep(0)
    assert await ask_until_over(engine, updating) == {version}


async def test_killed_in_mid_generation_then_restarted_with_its_weights(engine: EngineClient, weights: Weights) -> None:
    """A request at any moment of the restart waits: before the process is there, while it starts, half loaded."""
    changed, version, restarts = times(weights, 1.01), engine.weight_version + 1, engine.restarts
    await update_weights(engine, changed.items(), version)
    tasks = await running(engine, [[i, 2, 3] for i in range(3)])
    scheduler_of(engine).kill()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineLost) and not isinstance(r, GenerationTimeout) for r in results)
    assert engine.lost

    async def recover() -> None:
        await asyncio.gather(*(engine.recover() for _ in range(4)))

    recovering = asyncio.create_task(recover())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # both tasks have begun
    with pytest.raises(EngineError, match="wait_until_ready"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    assert await ask_until_over(engine, recovering) == {version}
    assert engine.restarts == restarts + 1  # one restart served all
    assert await engine.weights_checksum() == weights_checksum(changed.items())
