"""The real SGLang engine in its own process: numbers, weights, deadlines, faults."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import INTERRUPTED, EngineError, EngineLost, GenerateResult, GenerationTimeout
from rstar2_megatron.settings.schema import RolloutModelSettings, RolloutSettings, SGLangSettings
from rstar2_megatron.weights.checksum import weights_checksum
from tests.processes import command_line
from tests.rollout.engine.updates import update_weights

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
STOP = {"temperature": 1.0, "max_new_tokens": 16}
PROMPT = [5, 17, 33, 201, 7]


def settings_for(model: Path, **changes) -> RolloutSettings:
    return RolloutSettings(
        model=RolloutModelSettings(model_path=str(model), precision="fp32"),
        sglang=SGLangSettings(),
        max_total_tokens=8192,
        max_running_requests=16,
        **{"no_progress_timeout_s": 15.0, "max_engine_restarts": 1, **changes},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path):
    client = EngineClient(settings_for(tiny_model), name="test engine")
    await client.start()
    yield client
    family = psutil.Process().children(recursive=True)
    await client.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [p for p in alive if "engine_process" in " ".join(command_line(p))]


def hf_logprobs(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].float()
    predicted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return predicted.gather(1, torch.tensor(response)[:, None]).squeeze(1)


async def test_logprobs_of_concurrent_turns_are_the_models(engine: EngineClient, tiny_model: Path) -> None:
    """Many requests of all lengths, joined and left at different times, with cached prefixes from earlier turns."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

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


async def test_temperature_is_in_the_logprobs(engine: EngineClient, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    result = await engine.generate(PROMPT, {"temperature": 0.5, "max_new_tokens": 8}, timeout_s=60)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0] / 0.5
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1].gather(1, torch.tensor(result.token_ids).long()[:, None])
    assert torch.allclose(expected.squeeze(1), torch.tensor(result.logprobs), atol=1e-3)


async def test_stop_token_is_returned_and_ends_the_turn(engine: EngineClient) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    free = await engine.generate(PROMPT, greedy, timeout_s=60)
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    generated = free.token_ids.tolist()
    stop = generated[4]
    cut = await engine.generate(PROMPT, {**greedy, "ignore_eos": False, "stop_token_ids": [stop]}, timeout_s=60)
    assert cut.finish_reason == "stop"
    assert cut.token_ids.tolist() == generated[: generated.index(stop) + 1]
    assert len(cut.logprobs) == len(cut.token_ids)


async def test_prefix_is_cached_and_flushed(engine: EngineClient) -> None:
    prompt = list(range(100, 180))
    await engine.generate(prompt, STOP, timeout_s=60)
    assert (await engine.generate(prompt, STOP, timeout_s=60)).cached_tokens >= 70
    await engine.flush_cache()
    assert (await engine.generate(prompt, STOP, timeout_s=60)).cached_tokens == 0


def named_files(pid: int) -> set[str]:
    """Files in /dev/shm that the processes of an engine have mapped and that still have a name."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    maps = [line for p in family for line in Path(f"/proc/{p.pid}/maps").read_text().splitlines()]
    mapped = {line.partition("/dev/shm/")[2] for line in maps if "/dev/shm/sgl" in line}
    assert mapped, "SGLang no longer keeps files there"
    return {name for name in mapped if not name.endswith("(deleted)")}


async def test_an_engine_that_serves_has_no_named_files(engine: EngineClient) -> None:
    assert named_files(engine.pid) == set()


async def test_capacity_is_known(engine: EngineClient) -> None:
    assert engine.kv_capacity_tokens == 8192


async def test_a_request_too_long_is_refused_and_the_engine_lives(engine: EngineClient) -> None:
    with pytest.raises(EngineError):
        await engine.generate([1] * (engine.max_context_tokens + 100), STOP, timeout_s=60)
    assert len((await engine.generate(PROMPT, STOP, timeout_s=60)).token_ids)


async def test_deadline_aborts_the_request_only(engine: EngineClient) -> None:
    with pytest.raises(GenerationTimeout):
        await engine.generate(PROMPT, {"max_new_tokens": 4000, "ignore_eos": True}, timeout_s=0.3)
    assert not engine.lost
    assert len((await engine.generate(PROMPT, STOP, timeout_s=60)).token_ids) <= 16


async def test_abort_all_gives_back_what_there_is(engine: EngineClient) -> None:
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    waiting = [asyncio.create_task(engine.generate([i, 2, 3], sampling, timeout_s=120)) for i in range(4)]
    await asyncio.sleep(1.0)
    await engine.abort_all()
    results = await asyncio.gather(*waiting)
    assert {r.finish_reason for r in results} == {"abort"}
    assert all(len(r.logprobs) == len(r.token_ids) < 4000 for r in results)


async def test_weights_are_the_files(engine: EngineClient, tiny_model: Path) -> None:
    assert await engine.weights_checksum() == weights_checksum(load_file(tiny_model / "model.safetensors").items())


async def test_update_changes_outputs_version_and_checksums(engine: EngineClient, tiny_model: Path) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    before = await engine.generate(PROMPT, greedy, timeout_s=60)
    weights = load_file(tiny_model / "model.safetensors")
    torch.manual_seed(1)
    changed = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in weights.items()}
    several = 40_000
    await update_weights(engine, changed.items(), version=5, bucket_bytes=several)
    assert await engine.weights_checksum() == weights_checksum(changed.items())
    after = await engine.generate(PROMPT, greedy, timeout_s=60)
    assert after.token_ids.tolist() != before.token_ids.tolist()
    assert (before.weight_version, after.weight_version) == (0, 5)
    assert after.cached_tokens == 0

    await update_weights(engine, weights.items(), version=6)
    assert (await engine.generate(PROMPT, greedy, timeout_s=60)).token_ids.tolist() == before.token_ids.tolist()


async def test_an_update_interrupts_running_requests_which_go_on_with_the_new_weights(
    engine: EngineClient, tiny_model: Path
) -> None:
    """Requests that run, and those that reach the engine at the moment of the update; each token has its version."""
    weights = load_file(tiny_model / "model.safetensors")
    changed = {name: tensor * 1.02 for name, tensor in weights.items()}
    sampling = {"max_new_tokens": 1500, "ignore_eos": True}
    begun: set[int] = set()

    async def run(number: int) -> GenerateResult:
        heard = lambda tokens: begun.add(number) if tokens else None  # noqa: E731
        return await engine.generate([number, 2, 3], sampling, timeout_s=120, on_tokens=heard)

    running = [asyncio.create_task(run(number)) for number in range(3)]
    async with asyncio.timeout(60):
        while len(begun) < 3:
            await asyncio.sleep(0.01)
    late = asyncio.create_task(engine.generate([9, 2, 3], sampling, timeout_s=120))
    await asyncio.sleep(0)
    await asyncio.wait_for(update_weights(engine, changed.items(), version=11), 60)
    results = await asyncio.gather(*running, late)
    assert {r.finish_reason for r in results} == {INTERRUPTED}
    counts = [(len(r.token_ids), len(r.logprobs)) for r in results]
    assert all(0 < ids == logprobs < 1500 for ids, logprobs in counts[:3]), counts
    before = results[0].version_spans[-1][2]
    ids = [0, 2, 3, *results[0].token_ids.tolist()]
    after = await engine.generate(ids, STOP, timeout_s=60)
    assert before != 11 and {version for *_, version in after.version_spans} == {11}
    assert after.cached_tokens == 0  # nothing of the old weights is left
    await update_weights(engine, weights.items(), version=12)


async def test_bad_weights_are_refused_and_good_ones_mend_it(engine: EngineClient, tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    with pytest.raises(EngineError):
        await update_weights(engine, [("model.norm.weight", torch.zeros(3))], version=7)
    with pytest.raises(EngineLost, match="weights"):  # never generate from half an update
        await engine.generate(PROMPT, STOP, timeout_s=60)
    waiting = asyncio.create_task(engine.wait_until_ready())  # as a trajectory does, until another update succeeds
    with pytest.raises(ValueError, match="no weights"):
        await update_weights(engine, [], version=7)
    await asyncio.sleep(0)
    assert not waiting.done()
    await update_weights(engine, weights.items(), version=8)
    await asyncio.wait_for(waiting, 5)
    assert (await engine.generate(PROMPT, STOP, timeout_s=60)).weight_version == 8


async def test_memory_is_released_and_taken_again(engine: EngineClient, tiny_model: Path) -> None:
    """The order of a collocated step. A CPU frees nothing; the states and SGLang's own calls are the GPU's."""
    weights = load_file(tiny_model / "model.safetensors")
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    running = asyncio.create_task(engine.generate(PROMPT, sampling, timeout_s=120))
    await asyncio.sleep(0.3)
    with pytest.raises(EngineError, match="1 calls under way"):
        await engine.release_memory()
    await engine.abort_all()
    await running

    await engine.release_memory()
    await engine.release_memory()  # twice is once
    with pytest.raises(EngineError, match="resume_memory first"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    with pytest.raises(EngineError, match="resume_memory first"):
        await update_weights(engine, weights.items(), version=1)
    await engine.resume_memory(["weights"])
    await update_weights(engine, weights.items(), version=2)
    with pytest.raises(EngineError, match="kv_cache"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    await engine.resume_memory(["kv_cache"])
    assert (await engine.generate(PROMPT, STOP, timeout_s=60)).weight_version == 2
    assert await engine.weights_checksum() == weights_checksum(weights.items())

    await engine.release_memory()  # weights that nobody sent again are not there
    await engine.resume_memory()
    with pytest.raises(EngineLost, match="weights"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    await update_weights(engine, weights.items(), version=3)


async def test_idle_engine_sleeps(engine: EngineClient) -> None:
    family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    await asyncio.sleep(1.5)
    before = sum(sum(p.cpu_times()[:2]) for p in family)
    await asyncio.sleep(3)
    assert sum(sum(p.cpu_times()[:2]) for p in family) - before < 0.6


async def test_killed_in_mid_generation_then_restarted(engine: EngineClient, tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in weights.items()}
    await update_weights(engine, changed.items(), version=9)
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    waiting = [asyncio.create_task(engine.generate([i, 2, 3], sampling, timeout_s=120)) for i in range(4)]
    await asyncio.sleep(0.5)
    scheduler = max(psutil.Process(engine.pid).children(), key=lambda p: p.memory_info().rss)
    scheduler.kill()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, EngineLost) and not isinstance(r, GenerationTimeout) for r in results)
    assert engine.lost

    await asyncio.gather(*(engine.recover() for _ in range(4)))  # one restart serves all
    assert engine.restarts == 1
    assert await engine.weights_checksum() == weights_checksum(changed.items())
    assert (await engine.generate(PROMPT, STOP, timeout_s=60)).weight_version == 9


async def test_a_request_in_the_middle_of_a_restart_waits_for_the_weights(engine: EngineClient, tiny_model: Path) -> None:
    """At every moment of a restart and of an update: before the process is there, while it starts, half loaded."""
    weights = load_file(tiny_model / "model.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in weights.items()}

    async def ask() -> int:
        async with asyncio.timeout(60):
            await engine.wait_until_ready()
        return (await engine.generate(PROMPT, STOP, timeout_s=60)).weight_version

    async def ask_until_over(change: asyncio.Task[None]) -> list[int]:
        asking = []
        while not change.done():
            asking.append(asyncio.create_task(ask()))
            await asyncio.sleep(0.0 if len(asking) < 50 else 0.2)
        await change
        return await asyncio.gather(*asking)

    updating = asyncio.create_task(update_weights(engine, changed.items(), version=10))
    await asyncio.sleep(0)
    assert set(await ask_until_over(updating)) == {10}

    psutil.Process(engine.pid).kill()
    while not engine.lost:
        await asyncio.sleep(0.01)
    recovering = asyncio.create_task(engine.recover())
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="wait_until_ready"):
        await engine.generate(PROMPT, STOP, timeout_s=60)
    assert set(await ask_until_over(recovering)) == {10}
    assert await engine.weights_checksum() == weights_checksum(changed.items())


async def test_no_progress_is_a_loss_and_restarts_are_bounded(engine: EngineClient) -> None:
    child = engine._child
    assert child is not None
    child.settings = engine.settings.model_copy(update={"no_progress_timeout_s": 2.0})
    await asyncio.sleep(1.1)  # the watch looks again
    scheduler = max(psutil.Process(engine.pid).children(), key=lambda p: p.memory_info().rss)
    waiting = asyncio.create_task(engine.generate(PROMPT, {"max_new_tokens": 4000, "ignore_eos": True}, timeout_s=120))
    await asyncio.sleep(0.3)
    scheduler.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineLost, match="no token for 2 s"):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(EngineLost, match="max_engine_restarts"):  # its one restart is used up
        await engine.recover()


async def test_wrong_model_directory_fails_with_the_log(tmp_path: Path) -> None:
    client = EngineClient(settings_for(tmp_path / "missing"), name="nowhere")
    with pytest.raises(EngineLost, match="missing"):
        await client.start()
    await client.close()


async def test_engine_dies_with_its_parent(tiny_model: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from tests.rollout.engine.test_engine import EngineClient, Path, settings_for\n"
        f"asyncio.run(EngineClient(settings_for(Path({str(tiny_model)!r}))).start())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.getcwd()})
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while not children and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        children = psutil.Process(parent.pid).children(recursive=True)
    assert children
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


async def test_two_ranks_share_a_model(tiny_model: Path) -> None:
    """Tensor parallel 2: numbers, checksums and an update of weights are those of the whole model."""
    client = EngineClient(settings_for(tiny_model, tensor_parallel_size=2), name="two ranks")
    try:
        await client.start()
        assert named_files(client.pid) == set()
        weights = load_file(tiny_model / "model.safetensors")
        for version in (0, 1):
            if version:
                weights = {name: tensor * 1.1 for name, tensor in weights.items()}
                await update_weights(client, weights.items(), version=version)
            model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
            model.load_state_dict(weights, strict=False)
            prompts = [[(11 * i + j) % 400 for j in range(10 + 9 * i)] for i in range(4)]
            results = await asyncio.gather(*(client.generate(ids, STOP, timeout_s=120) for ids in prompts))
            for ids, result in zip(prompts, results, strict=True):
                expected = hf_logprobs(model, ids, result.token_ids.tolist())
                assert torch.allclose(expected, torch.tensor(result.logprobs), atol=1e-3)
                assert {span[2] for span in result.version_spans} == {version}
            assert await client.weights_checksum() == weights_checksum(weights.items())
    finally:
        await client.close()
