"""The environment in which an engine on a GPU compiles its kernels."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from rstar2_megatron.rollout.engine.arguments import gpu_environment
from rstar2_megatron.rollout.engine.protocol import EngineError


def program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_the_toolkit_and_this_environments_programs_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    program(tmp_path / "venv/bin/ninja")
    program(tmp_path / "cuda/bin/nvcc")
    environment = {"PATH": "/bin", "RSTAR2_CUDA_HOME": str(tmp_path / "cuda"), "LD_LIBRARY_PATH": "/mine"}
    found = gpu_environment(environment)
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia/cu13"
    assert found == {
        "PATH": f"{tmp_path}/venv/bin:{tmp_path}/cuda/bin:/bin",
        "CUDA_HOME": str(tmp_path / "cuda"),
        "LD_LIBRARY_PATH": f"{wheels}/lib:/mine",  # the runtime that torch loads, whatever the toolkit
        "SGLANG_NUMA_BIND_V2": "0",
    }
    assert gpu_environment(found) == found  # as the launcher has set it


def test_what_is_missing_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    with pytest.raises(EngineError, match=r"ninja and nvcc not found on PATH=.*setup_env.sh"):
        gpu_environment({"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)})
