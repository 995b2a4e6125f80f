"""Stand-ins that let SGLang import and run without a GPU. `install()` does nothing when CUDA is available.

SGLang 0.5.21 imports triton, torchvision and sgl_kernel at module level and calls them only on a GPU. Absent modules are
replaced by empty ones: every attribute exists, and launching a kernel raises an error. The installed SGLang package is not
changed. Every process calls `install()` before it imports sglang.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

EXTERNAL_MODELS = "rstar2_megatron.cpu.sgl_models"
_libraries: list[torch.library.Library] = []  # kept alive: a collected Library takes its operators with it


@functools.cache
def install() -> None:
    """Install the stand-ins once per process."""
    if torch.cuda.is_available():
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Otherwise SGLang imports all its model files (10 s), as it still does for other architectures.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", EXTERNAL_MODELS)
    _replace_absent_modules()
    _replace_sgl_kernel()


def allow_seeded_sampling() -> None:
    """Let SGLang sample by the seeds of requests (`enable_deterministic_inference`) with the attention of a CPU.

    Call after `install`. Batches of other sizes may still differ in the last bits of their logits.
    """
    if torch.cuda.is_available():
        return
    arguments = importlib.import_module("sglang.srt.server_args")
    arguments.add_deterministic_attention_backend_choices(["torch_native"])
    arguments.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def prepare_scheduler() -> None:
    """Set up the process that runs the model: products, attention and sampling for a CPU, no torch.compile, no NCCL."""
    if torch.cuda.is_available():
        return
    importlib.import_module("torch._dynamo").config.disable = True
    # torch's CUDA build brings NCCL's library to a machine without a GPU too, and SGLang would open a communicator on CUDA for
    # a group of CPU ranks. Told that there is no library, it does without.
    pynccl: Any = importlib.import_module("sglang.srt.distributed.device_communicators.pynccl")
    pynccl.NCCLLibrary = _no_nccl
    from rstar2_megatron.cpu import products, sglang_attention, sglang_sampling  # import SGLang, which needs the stand-ins

    products.install(kernels=64)  # a decoding step has any number of rows
    sglang_attention.install()
    sglang_sampling.install()


def _no_nccl(path: str | None = None) -> Any:
    raise OSError("no NCCL on a machine without a GPU")


class _EmptyModule(types.ModuleType):
    """A module in which every attribute exists: classes for capitalised names, submodules for all others.

    As a decorator it returns the function unchanged. A "kernel" is then a plain function, and launching it
    (`kernel[grid](...)`) raises TypeError.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[:1].isupper():
            value = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class _EmptyModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: set[str]) -> None:
        self.roots = roots

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _replace_absent_modules() -> None:
    absent = {name for name in ("triton", "torchvision") if importlib.util.find_spec(name) is None}
    if "torchvision" in absent:
        _cache_absence_of_torchvision()
    if absent:
        sys.meta_path.append(_EmptyModuleFinder(absent))
    if "triton" in absent:
        triton = importlib.import_module("triton")
        language = importlib.import_module("triton.language")
        vars(triton).update(
            __version__="3.0.0",
            cdiv=lambda a, b: -(a // -b),
            next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
        )
        vars(language)["constexpr"] = _Constexpr


class _Constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


def _cache_absence_of_torchvision() -> None:
    """Let transformers find that torchvision is absent, before the stand-in exists."""
    import_utils = importlib.import_module("transformers.utils.import_utils")
    import_utils.is_torchvision_available()  # caches its result
    importlib.import_module("transformers.processing_utils")  # replaces the module in sys.modules
    module: Any = sys.modules["transformers"]
    if getattr(module.AutoImageProcessor, "_backends", None):  # a user may have installed torchvision
        # transformers' dummy raises on use, but sglang registers processors on it at import.
        register = staticmethod(lambda *args, **kwargs: None)
        module.AutoImageProcessor = type("AutoImageProcessor", (), {"register": register})


def _replace_sgl_kernel() -> None:
    try:
        importlib.import_module("sgl_kernel")  # a build for the CPU is used when installed
        return
    except ImportError:  # absent, or the CUDA wheel without its libraries
        for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    vars(module)["assign_req_to_token_pool_cpu"] = _assign_req_to_token_pool
    vars(module)["__getattr__"] = _missing_kernel
    sys.modules["sgl_kernel"] = module
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _libraries.append(library)


def _missing_kernel(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a machine without a GPU")

    return kernel


def _assign_req_to_token_pool(
    pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    pool_length: int,
) -> None:
    """Write each request's new KV locations into its row; `locations` concatenates them over the requests."""
    offset = 0
    for row, start, end in zip(pool_indices.tolist(), starts.tolist(), ends.tolist()):
        req_to_token[row, start:end] = locations[offset : offset + end - start].to(req_to_token.dtype)
        offset += end - start


_U32 = 0xFFFFFFFF


def _multiply(a: torch.Tensor, b: int) -> torch.Tensor:
    """a * b modulo 2**32 without overflowing int64."""
    return (a * (b & 0xFFFF) + (((a * (b >> 16)) & 0xFFFF) << 16)) & _U32


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _U32


def _mix(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = _multiply(_rotate(_multiply(key, 0xCC9E2D51), 15), 0x1B873593)
    return (_multiply(_rotate(state ^ key, 13), 5) + 0xE6546B64) & _U32


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column), the same bits as SGLang's GPU kernel.

    seed, positions [n]; columns [m]; returns uint32 [n, m]. Seeded sampling uses it.
    """
    seed, positions, columns = seed.long(), positions.long() & _U32, columns.long() & _U32
    state = _mix(_mix(torch.zeros_like(seed), seed & _U32), (seed >> 32) & _U32)
    state = _mix(state, positions)
    state = _mix(state[:, None], columns[None, :]) ^ 16
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)
