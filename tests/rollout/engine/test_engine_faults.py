"""Engines of their own that fail: without a model, without progress, without a parent, with weights that one rank refuses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rstar2_megatron.rollout.engine.child import EngineChild
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost, read_message
from rstar2_megatron.services.process import listen
from rstar2_megatron.weights.bucket import Bucket, buckets
from rstar2_megatron.weights.checksum import weights_checksum
from rstar2_megatron.weights.cuda_ipc import DeviceBucket, handle_of
from rstar2_megatron.weights.shared_memory import WeightBucket
from tests.rollout.engine.small import ENDLESS, PROMPT, hf_logprobs, named_files, scheduler_of, settings_for, update_weights

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]


async def test_no_progress_is_a_loss_and_restarts_are_bounded(tiny_model: Path) -> None:
    engine = EngineClient(settings_for(tiny_model, no_progress_timeout_s=10.0, max_engine_restarts=0), name="stopped engine")
    try:
        await engine.start()
        scheduler = scheduler_of(engine)
        waiting = asyncio.create_task(engine.generate(PROMPT, ENDLESS, timeout_s=300))
        while not engine.num_waiting_calls:
            await asyncio.sleep(0)
        scheduler.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineLost, match="no token for 10 s"):
            await asyncio.wait_for(waiting, 120)
        with pytest.raises(EngineLost, match="max_engine_restarts"):
            await engine.recover()
    finally:
        await engine.close()


async def test_an_abort_waits_for_no_answer(tmp_path: Path) -> None:
    """An engine that gives none would hold the end of a phase, for longer than the driver waits."""
    settings, (ours, theirs) = settings_for(tmp_path), socket.socketpair()
    client = EngineClient(settings, name="silent")
    client._child = child = EngineChild(settings, {}, name="silent", log_path=None)
    _, child._writer = await asyncio.open_unix_connection(sock=ours)
    client._owned["a trajectory"] = "7"
    client.abort("a trajectory")
    client.abort("another one")
    client.abort_all()
    with contextlib.closing(theirs):
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        assert [(await read_message(reader))[1:] for _ in range(2)] == [["abort", {"rid": "7"}], ["abort", {"rid": ""}]]
        writer.close()
        await child.end()


async def test_wrong_model_directory_fails_with_the_log(tmp_path: Path) -> None:
    client = EngineClient(settings_for(tmp_path / "missing"), name="nowhere")
    with pytest.raises(EngineLost, match="missing"):
        await client.start()
    await client.close()


async def test_a_port_that_is_taken_at_the_start_costs_one_more_start(tiny_model: Path, tmp_path: Path) -> None:
    settings, log = settings_for(tiny_model), tmp_path / "engine.log"
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        settings.sglang.server_args["nccl_port"] = taken.getsockname()[1]
        engine = EngineClient(settings, name="unlucky", log_path=log)
        try:
            start = asyncio.create_task(engine.start())
            while "address already in use" not in (log.read_text().lower() if log.exists() else ""):
                assert not start.done()
                await asyncio.sleep(0.05)
            taken.close()
            await start
            assert (await engine.generate(PROMPT, {"temperature": 0.0, "max_new_tokens": 2}, timeout_s=60)).token_ids.tolist()
        finally:
            await engine.close()


PARENT = """
import asyncio, sys
from pathlib import Path
from rstar2_megatron.rollout.engine.client import EngineClient
from tests.rollout.engine.small import settings_for

async def main():
    engine = EngineClient(settings_for(Path(sys.argv[1])))
    await engine.start()
    print("serves", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_engine_dies_with_its_parent(tiny_model: Path) -> None:
    """While it starts, and when it serves."""
    root = Path(__file__).parents[3]
    for serves in (False, True):
        command = [sys.executable, "-c", PARENT, str(tiny_model)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
        assert parent.stdout is not None
        if serves:
            assert parent.stdout.readline() == b"serves\n"
        while not (children := psutil.Process(parent.pid).children(recursive=True)):
            assert parent.poll() is None
            await asyncio.sleep(0.05)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.fixture
def nccl_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with NCCL's names, as torch's CUDA build brings one to a machine without a GPU."""
    sglang = find_spec("sglang")
    assert sglang is not None and sglang.origin is not None
    text = Path(sglang.origin).with_name("srt").joinpath("distributed/device_communicators/pynccl_wrapper.py").read_text()
    code = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(set(re.findall(r'"(nccl[A-Z]\w+)"', text))))
    library = tmp_path / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"], input=code, text=True, check=True)
    monkeypatch.setenv("SGLANG_NCCL_SO_PATH", str(library))


@pytest.mark.usefixtures("nccl_without_a_gpu")
async def test_two_ranks_share_a_model_and_refuse_weights_together(tiny_model: Path) -> None:
    """Tensor parallel 2: numbers, checksums and an update of weights are those of the whole model."""
    client = EngineClient(settings_for(tiny_model, tensor_parallel_size=2), name="two ranks")
    weights = load_file(tiny_model / "model.safetensors")

    async def from_both(first: bytes, second: bytes) -> AsyncIterator[tuple[WeightBucket, bool]]:
        yield DeviceBucket([first, second], num_bytes=0), True

    try:
        await client.start()
        assert named_files(client.pid) == set()
        for version in (0, 1):
            if version:
                weights = {name: tensor * 1.1 for name, tensor in weights.items()}
                await update_weights(client, weights.items(), version=version)
            model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
            model.load_state_dict(weights, strict=False)
            prompts = [[(11 * i + j) % 400 for j in range(10 + 9 * i)] for i in range(4)]
            results = await asyncio.gather(*(client.generate(ids, {"max_new_tokens": 16}, timeout_s=120) for ids in prompts))
            for ids, result in zip(prompts, results, strict=True):
                expected = hf_logprobs(model, ids, result.token_ids.tolist())
                assert torch.allclose(expected, torch.tensor(result.logprobs), atol=1e-3)
                assert {span[2] for span in result.version_spans} == {version}
            assert await client.weights_checksum() == weights_checksum(weights.items())

        # SGLang answers with the result of rank 0 alone: rank 1 would serve the old weights under the new version
        more = {name: tensor * 1.1 for name, tensor in weights.items()}
        [(whole, _)] = buckets(more.items(), sum(tensor.nbytes for tensor in more.values()))
        good = handle_of(whole)
        broken = handle_of(Bucket(torch.zeros(64, dtype=torch.uint8), {"model.norm.weight": (0, (3, 3), torch.float32)}))
        with pytest.raises(EngineError, match="tensor-parallel rank 1"):
            await client.update_weights(from_both(good, broken), version=2)
        await client.update_weights(from_both(good, good), version=3)
        assert await client.weights_checksum() == weights_checksum(more.items())
    finally:
        await client.close()


async def test_an_engine_loads_the_files_that_the_actor_loads(tiny_model: Path, tmp_path: Path) -> None:
    """SGLang alone would load the backup over the model."""
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    good = load_file(tiny_model / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in good.items()}, directory / "old-backup.safetensors")
    client = EngineClient(settings_for(directory), name="a backup")
    try:
        await client.start()
        assert await client.weights_checksum() == weights_checksum(good.items())
    finally:
        await client.close()
