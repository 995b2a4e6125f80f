"""What must be set before the CUDA context or TransformerEngine reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.actor.network import model
from rstar2_megatron.actor.process_groups import order_collectives
from rstar2_megatron.model.model_config import ModelConfig
from tests.actor.tiny import settings

CONNECTIONS, UNFUSED = "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_UNFUSED_ATTN"


def test_an_actor_touches_no_device_before_collectives_are_ordered(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream creates the context, which reads the variable."""
    seen: list[str | None] = []
    monkeypatch.delenv(CONNECTIONS, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: seen.append(os.environ.get(CONNECTIONS)))
    actor, runner, algorithm = settings()
    MegatronActor(
        actor, runner, algorithm, model_path=str(models["qwen2"]), rank=0, world_size=1, init_method="", device="cuda"
    )
    assert seen == []
    order_collectives()
    assert os.environ[CONNECTIONS] == "1"


@pytest.mark.parametrize(
    ("implementation", "precision", "after"),
    [("transformer_engine", "bf16", "0"), ("transformer_engine", "fp32", "1"), ("local", "bf16", "1")],
)
def test_slow_attention_is_never_chosen_without_a_word(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, implementation: Any, precision: str, after: str
) -> None:
    """megatron-core sets the variable to 1 and refuses another value while it makes a model; a second model is made too."""

    class Chunk(torch.nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            assert os.environ.get(UNFUSED) in (None, "1")  # language_module.py, check_and_set_env_variable
            os.environ[UNFUSED] = "1"

    monkeypatch.delenv(UNFUSED, raising=False)
    monkeypatch.setattr(model, "PolicyModel", Chunk)
    monkeypatch.setattr(model, "block_spec", lambda *_: None)
    monkeypatch.setattr(model, "Float16Module", lambda _, chunk: chunk)
    stage = SimpleNamespace(is_pipeline_first_stage=lambda **_: True, is_pipeline_last_stage=lambda **_: True)
    monkeypatch.setattr(model, "parallel_state", stage)
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=None, bf16=precision == "bf16")
    monkeypatch.setattr(model, "transformer_config", lambda *_: config)  # the real one asks for TransformerEngine
    actor, _, _ = settings(model={"precision": precision})
    for _ in range(2):
        model.build_chunks(ModelConfig.from_directory(models["qwen2"]), actor.model, implementation, "cpu")
        assert os.environ[UNFUSED] == after


def test_a_rank_with_a_cuda_build_and_no_gpu_prints_nothing() -> None:
    """torch's CUDA build warns of a toolkit without a GPU where megatron-core imports its compiler's helpers."""
    adapt = "from rstar2_megatron.cpu import megatron; megatron.install(); "
    build = (
        "import torch; torch.version.cuda = '13.0'; torch.cuda._is_compiled = lambda: True; "
        "torch.cuda.is_available = lambda: False; import importlib, torch.utils.cpp_extension as compiler; "
        "print(importlib.reload(compiler).CUDA_HOME)"
    )

    def said(program: str) -> tuple[str, bool]:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={**os.environ, "CUDA_HOME": "/usr/toolkit"},
        )
        return done.stdout.strip(), "No CUDA runtime is found" in done.stderr

    assert said(build) == ("/usr/toolkit", True)
    assert said(adapt + build) == ("/usr/toolkit", False)
