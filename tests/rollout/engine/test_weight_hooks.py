"""What this project adds to SGLang's scheduler: weights on several ranks, a wake-up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import EngineError
from rstar2_megatron.weights.checksum import weights_checksum
from rstar2_megatron.weights.cuda_ipc import flatten, handle_of
from tests.rollout.engine.test_engine import settings_for

WAKE_UP = """
from rstar2_megatron.cpu import sglang as shim
shim.install()
from types import SimpleNamespace
import torch
from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from rstar2_megatron.rollout.engine import weight_hooks

weight_hooks.install()
pool = ReqToTokenPool(size=3, max_context_len=5, device="cpu", enable_memory_saver=False)
pool.req_to_token.fill_(1 << 30)  # as memory that was released and mapped again may be
manager = SchedulerWeightUpdaterManager(
    tp_worker=None, draft_worker=None, tp_cpu_group=None,
    memory_saver_adapter=SimpleNamespace(resume=lambda tag: None), flush_cache=None, is_fully_idle=None,
    scheduler=SimpleNamespace(disaggregation_mode=None, req_to_token_pool=pool), offload_tags={"kv_cache", "cuda_graph"},
)
manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["cuda_graph"]))
assert int(pool.req_to_token.min()) == 1 << 30  # its memory is not there yet
manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
assert pool.req_to_token[0].tolist() == [0] * 5 and int(pool.req_to_token[1:].min()) == 1 << 30
"""


def test_the_padding_row_is_zero_after_a_wake_up() -> None:
    """With SGLang's own classes."""
    subprocess.run([sys.executable, "-c", WAKE_UP], check=True, timeout=240)


async def test_a_bucket_that_one_rank_cannot_load_is_refused(tiny_model: Path) -> None:
    """SGLang answers with the result of rank 0 alone: rank 1 would serve the old weights under the new version."""
    flat, places = flatten({name: tensor * 1.1 for name, tensor in load_file(tiny_model / "model.safetensors").items()})
    good = handle_of(flat, places)
    broken = handle_of(torch.zeros(64, dtype=torch.uint8), {"model.norm.weight": (0, (3, 3), torch.float32)})
    client = EngineClient(settings_for(tiny_model, tensor_parallel_size=2), name="two ranks")
    try:
        await client.start()
        await client._update_call("begin_update", None)
        with pytest.raises(EngineError, match="tensor-parallel rank 1"):
            await client._update_call("load_bucket", {"handles": [good, broken], "version": 1})
        await client._update_call("load_bucket", {"handles": [good, good], "version": 1})
        await client._update_call("end_update", None)
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
