"""Builds SGLang's arguments and the child's environment from the YAML's rollout section."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

import rstar2_megatron
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.rollout.engine.protocol import EngineError
from rstar2_megatron.rollout.engine.weight_hooks import LOADER
from rstar2_megatron.settings.sections.rollout import CONTEXT_SLACK, RolloutSettings

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_CPU_KV_TOKENS = 65536
REWARD_MODELS = "rstar2_megatron.rollout.engine.reward_models"


def engine_arguments(
    settings: RolloutSettings,
    *,
    seed: int = 0,
    max_context_tokens: int | None = None,
    memory_saver: bool = False,
    scores: bool = False,
) -> dict[str, Any]:
    """Arguments of `sglang.srt.entrypoints.engine.Engine`; `rollout.sglang.server_args` overrides all others.

    `memory_saver` lets a GPU engine release its memory; it has no effect on a CPU. `scores`: of a reward model.
    """
    arguments: dict[str, Any] = {
        "model_path": settings.model.model_path,
        "dtype": _DTYPES[settings.model.precision],
        "skip_tokenizer_init": True,
        "tp_size": settings.tensor_parallel_size,
        "max_running_requests": settings.max_running_requests,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "custom_weight_loader": [LOADER],
        "weight_version": "0",
        "random_seed": seed,
        "sleep_on_idle": True,  # otherwise the idle scheduler spins on a core while the actor trains
        "grammar_backend": "none",
        "schedule_policy": "lpm",  # longest prefix match: compute the prompt of a group once
        "log_level": "warning",
        # SGLang would end an engine whose batch takes 300 s, as the first one may, which compiles kernels. The client watches.
        "watchdog_timeout": settings.engine_start_timeout_s,
    }
    if max_context_tokens is not None:  # SGLang refuses more than the model supports
        model = ModelConfig.from_directory(settings.model.model_path, scores=scores)
        longest = model.max_position_embeddings
        arguments["context_length"] = min(max_context_tokens + CONTEXT_SLACK, longest)
    if scores:
        arguments["is_embedding"] = True
    if settings.max_total_tokens is not None:
        arguments["max_total_tokens"] = settings.max_total_tokens
    if settings.sglang.attention_backend != "auto":
        arguments["attention_backend"] = settings.sglang.attention_backend
    if settings.request_seeds:
        arguments["enable_deterministic_inference"] = True
    if torch.cuda.is_available():
        arguments["enable_memory_saver"] = memory_saver
        # SGLang would capture 58 sizes up to 8,192 tokens: over a GB that the plan does not count (estimate).
        arguments["cuda_graph_max_bs_prefill"] = 512
    else:
        arguments |= {
            "device": "cpu",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
        }
        arguments.setdefault("attention_backend", "torch_native")
        arguments.setdefault("max_total_tokens", _CPU_KV_TOKENS)
    return arguments | settings.sglang.server_args


def gpu_environment(environment: dict[str, str]) -> dict[str, str]:
    """PATH, CUDA_HOME and LD_LIBRARY_PATH for an engine on a GPU, which compiles kernels while it runs.

    RSTAR2_CUDA_HOME or CUDA_HOME names the toolkit; the default is the one in this Python environment's wheels. The library
    that lets an engine release its memory is preloaded, before torch can load the CUDA runtime that it needs. So that of the
    wheels, which torch loads too, must be on the loader's path. Raises EngineError when ninja or nvcc is missing.
    """
    toolkit = environment.get("RSTAR2_CUDA_HOME") or environment.get("CUDA_HOME")
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    home = Path(toolkit) if toolkit else wheels
    before = environment.get("PATH", os.defpath).split(":")
    path = ":".join(dict.fromkeys([str(Path(sys.executable).parent), str(home / "bin"), *before]))
    missing = [tool for tool in ("ninja", "nvcc") if shutil.which(tool, path=path) is None]
    if missing:
        raise EngineError(
            f"{' and '.join(missing)} not found on PATH={path}: SGLang compiles kernels while it runs; bash "
            "scripts/setup_env.sh installs both, RSTAR2_CUDA_HOME names another CUDA toolkit"
        )
    libraries = [str(wheels / "lib"), *filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))]
    return {
        "PATH": path,
        "CUDA_HOME": str(home),
        "LD_LIBRARY_PATH": ":".join(dict.fromkeys(libraries)),
        # SGLang binds its processes to NUMA nodes itself; the other way is a script in /tmp, where programs may not start.
        "SGLANG_NUMA_BIND_V2": environment.get("SGLANG_NUMA_BIND_V2", "0"),
    }


def child_environment(settings: RolloutSettings, environment: dict[str, str], *, scores: bool = False) -> dict[str, str]:
    """The child's environment: this package on its path; on a GPU `gpu_environment`, on a CPU the number of threads.

    scores: the engine serves a reward model, of the classes in `reward_models/`.
    """
    root = str(Path(rstar2_megatron.__file__).parents[1])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(":"))]
    environment = environment | {"PYTHONPATH": ":".join(dict.fromkeys(paths))}
    if scores:
        environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = REWARD_MODELS
    if torch.cuda.is_available():
        environment |= gpu_environment(environment)
    else:
        environment["OMP_NUM_THREADS"] = str(settings.cpu_threads)
        # spinning threads starve the others when cores are shared (2 threads: 50 times slower)
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        environment.setdefault("GOMP_SPINCOUNT", "0")
        if settings.tensor_parallel_size > 1:
            ranks = range(settings.tensor_parallel_size)
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, ranks)))
    return environment
