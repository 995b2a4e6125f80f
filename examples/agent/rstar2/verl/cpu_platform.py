"""A CPU as a platform of verl 0.9.1, and this project's SGLang engine on a CPU as a rollout backend of verl.

verl imports this module in each of its processes (VERL_USE_EXTERNAL_MODULES=cpu_platform). It uses verl's registries only; no
file of verl changes. The backend's name is `sglang_cpu`; `cpu_rollout` holds it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_MEMORY = 16 << 30  # bytes that verl's log shows; nothing depends on them


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device_module() -> types.ModuleType:
    """The calls of `torch.cuda` that verl makes, for a CPU."""
    module = types.ModuleType("cpu_device")
    for name in (
        "empty_cache",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "set_device",
        "set_per_process_memory_fraction",
        "synchronize",
    ):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *args: 0)
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "get_device_name": lambda *args: "cpu",
        "mem_get_info": lambda *args: (_MEMORY // 2, _MEMORY),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "current_stream": torch.cpu.current_stream,
        "Stream": torch.cpu.Stream,
        "stream": torch.cpu.stream,
        "Event": type("Event", (), {"record": _nothing, "synchronize": _nothing}),
    }
    for name, value in values.items():
        setattr(module, name, value)
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """One CPU "device" a node. Ray schedules it as the logical resource GPU (ray_init.num_gpus=1)."""

    _module = _device_module()
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = property(lambda self: self._module)
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = _nothing
    empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl uses it as a target of Tensor.to

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


def _accept_one_backend_twice() -> None:
    """verl names a backend for the CPU and one for the device; here both are the CPU, which torch refuses as a duplicate."""
    begin = distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        begin("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    distributed.init_process_group = init_process_group


def _register_rollout() -> None:
    # Here: these modules of verl ask for the platform when they are imported.
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> type:
        from cpu_rollout import CPUReplica  # after verl itself

        return CPUReplica

    RolloutReplicaRegistry.register("sglang_cpu", load)
    _ROLLOUT_REGISTRY["sglang_cpu", "async"] = "cpu_rollout.CPUServerAdapter"


_accept_one_backend_twice()
_register_rollout()
