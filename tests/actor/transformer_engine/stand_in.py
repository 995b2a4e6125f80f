"""Loads TransformerEngine's Python without its compiled extension, and lets the actor of this process take it.

It is for processes that do nothing else: torch's functions are replaced. Its files are those of the pinned wheel, which is
pure Python (`scripts/setup_env.sh --dev` unpacks it beside the environment, so that nothing else finds it). Not shown here:
NCCL, cuDNN, streams, CUDA IPC, torch.compile, and the copies of expert parallelism to the host.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.actor.transformer_engine import kernels

FILES = Path(sys.prefix) / "transformer_engine_python"
_H100 = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100", total_memory=85 * 10**9)
_ANSWERS = {
    "get_device_compute_capability": (9, 0),
    "_get_device_compute_capability": (9, 0),
    "get_cudnn_version": (9, 20, 0),
    "get_sm_count": 132,
}
"""What TransformerEngine's modules ask the device for."""


def install() -> None:
    """Once in a process, before megatron-core is imported. Raises FileNotFoundError without the wheel's files."""
    if not (FILES / "transformer_engine").is_dir():
        raise FileNotFoundError(f"{FILES} is absent: bash scripts/setup_env.sh --dev")
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "TORCHDYNAMO_DISABLE": "1"}  # the first: load no library
    sys.path.insert(0, str(FILES))
    sys.modules["transformer_engine_torch"] = _extension()
    _load_package()
    from rstar2_megatron.cpu import megatron

    megatron.install()
    _play_a_gpu(megatron._on_cpu)
    _choose_it()


def _extension() -> Any:
    """The compiled module: our kernels, its enums, and for everything else a mock that no path here may compute with."""
    extension = mock.MagicMock(name="transformer_engine_torch")
    for kernel in kernels.EXTENSION:
        setattr(extension, kernel.__name__, kernel)
    extension.get_num_cublas_streams = lambda: 4
    extension.get_fused_attn_backend = lambda *args: 1
    backends = {"NVTE_F16_max512_seqlen": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2, "NVTE_No_Backend": -1}
    extension.NVTE_Fused_Attn_Backend = type("NVTE_Fused_Attn_Backend", (), backends)
    names = ("Byte", "Int32", "Int64", "Float32", "Float16", "BFloat16", "Float8E4M3", "Float8E5M2", "Float4E2M1")
    extension.DType = type("DType", (), {f"k{name}": kernels.DType(f"k{name}") for name in names})
    for name in ("CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "FP8TensorMeta"):
        setattr(extension, name, type(name, (), {}))
    extension.CommOverlapType = type("CommOverlapType", (), {"AG": 0, "RS": 1})
    forward = [f"GEMM{n}_{part}" for n in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")]
    backward = [f"GRAD_{part}{n}" for n in (1, 2, 3) for part in ("OUTPUT", "INPUT")]
    for name, members in (("FP8FwdTensors", forward), ("FP8BwdTensors", backward)):
        setattr(extension, name, enum.IntEnum(name, {member: number for number, member in enumerate(members)}))
    # `cpp_extensions` takes everything from the extension and adds functions of its own, which must stay.
    sources = [file.read_text() for file in (FILES / "transformer_engine" / "pytorch").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\btex\.(\w+)", text)}
    own = {name for text in sources for name in re.findall(r"^def (\w+)", text, re.MULTILINE)}
    extension.__all__ = sorted(used - own)
    return extension


def _load_package() -> None:
    """`transformer_engine` and `transformer_engine.pytorch` from their files, without the part that needs Triton or ONNX."""
    package = _package("transformer_engine")
    package.__version__ = "2.11.0"
    import transformer_engine.common as common

    package.common, common.load_framework_extension = common, lambda framework: None
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()
    triton = types.ModuleType("transformer_engine.pytorch.triton")
    triton.__path__ = []
    sys.modules[triton.__name__] = triton
    for name in ("pad", "permutation", "cross_entropy"):
        module = mock.MagicMock(name=name)
        sys.modules[f"{triton.__name__}.{name}"] = module
        setattr(triton, name, module)
    for kernel in kernels.TRITON:
        setattr(triton.permutation, kernel.__name__, kernel)
    pytorch = _package("transformer_engine.pytorch")
    pytorch.triton = triton
    pytorch.__spec__.loader.exec_module(pytorch)
    package.pytorch = pytorch


def _package(name: str) -> Any:
    directory = FILES.joinpath(*name.split("."))
    spec = importlib.util.spec_from_file_location(name, directory / "__init__.py", submodule_search_locations=[str(directory)])
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    return module


class _Stream:
    """A CUDA stream on which everything has ended already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Stream()


class _Asking:
    """torch, or torch.cuda, as TransformerEngine's modules see it: with a device."""

    def __init__(self, module: Any, **answers: Any) -> None:
        self._module = module
        for name, answer in answers.items():
            setattr(self, name, answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _play_a_gpu(on_cpu: Any) -> None:
    factories: Any = torch
    for name in ("empty", "arange", "full", "empty_strided"):
        setattr(factories, name, on_cpu(getattr(torch, name)))
    factories.mm, factories.addmm = kernels.mm_with_dtype(torch.mm), kernels.addmm_with_dtype(torch.addmm)
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *args: _H100
    cuda.get_device_capability = lambda *args: (_H100.major, _H100.minor)
    cuda.get_device_name = lambda *args: "NVIDIA H100 80GB HBM3"
    cuda.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *args: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    tensor_class: Any = torch.Tensor
    tensor_class.is_cuda = property(lambda self: True)
    import transformer_engine.pytorch.module.base as base

    base.torch = _Asking(torch, cuda=_Asking(torch.cuda, is_available=lambda: True))
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and isinstance(module, types.ModuleType):
            for question in _ANSWERS.keys() & vars(module).keys():
                setattr(module, question, lambda *args, question=question: _ANSWERS[question])


def _choose_it() -> None:
    """As on a GPU: the actor takes TransformerEngine, and megatron-core's configuration is that of a GPU."""
    from rstar2_megatron.actor import policy
    from rstar2_megatron.actor.network import model

    choose: Any = policy
    choose.choose_implementation = lambda wanted, device: "transformer_engine"
    build: Any = model
    plain = model.transformer_config
    build.transformer_config = lambda config, settings, implementation, device: plain(config, settings, implementation, "cuda")
