"""What this project adds to SGLang's scheduler at a wake-up. Weights on several ranks: test_engine_faults.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.ci
def test_the_padding_row_is_zero_after_a_wake_up() -> None:
    """With SGLang's own classes."""
    subprocess.run([sys.executable, "-c", WAKE_UP], check=True, timeout=240)
