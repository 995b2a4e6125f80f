"""Stand-ins that let megatron-core 0.16.1 train on CPU over gloo.

`install()` does nothing when CUDA is available. It changes no arithmetic, only the device of tensors and the random
generator that is tracked. Line numbers refer to megatron-core 0.16.1.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

# megatron-core is imported inside functions, because `install` must run before any import of it.

_FACTORIES = ("tensor", "zeros", "ones", "empty_like")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with device="cuda" replaced by the CPU and pinned memory by ordinary memory."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


@functools.cache
def install() -> None:
    """Install the stand-ins, once per process, before a model is built."""
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its compiled CPU kernels need a C++ compiler
    # torch's CUDA build warns, in each rank, of a toolkit without a GPU (nccl_allocator.py:11 imports it).
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    # `device=torch.cuda.current_device()` (mappings.py:91, layers.py:261, p2p_communication.py:313, ...).
    cuda.current_device = lambda: cpu
    # Stream barriers around p2p (p2p_communication.py:242, 398) and around checkpoint saving.
    cuda.synchronize = lambda *args, **kwargs: None
    # Literal device="cuda" and pin_memory=True (schedules.py:596, clip_grads.py:103, optimizer.py:473-485,
    # transformer/utils.py:35, rope_utils.py:63, state_dict_saver.py:204).
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Tensor.cuda() (language_module.py:244 for tied embeddings, tensor_parallel/data.py:84).
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda self, *args, **kwargs: self
    _answer_cuda_type_names()
    _track_cpu_generator()
    _dispatch_on_host()


def _answer_cuda_type_names() -> None:
    """Return CUDA type names ("torch.cuda.FloatTensor"), by which megatron-core sorts parameters, to megatron-core only.

    distrib_optimizer.py:361, 420, 582; optimizer.py:671, 690; clip_grads.py:167.
    """
    plain_type = torch.Tensor.type
    tensor_class: Any = torch.Tensor

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not args and not kwargs and caller.startswith("megatron."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensor_class.type = type_name


def _track_cpu_generator() -> None:
    """Make Megatron's tracker of CUDA generators (tensor_parallel/random.py:40-110, 422) track the CPU's."""
    import megatron.core.tensor_parallel.random as tracker

    cuda: Any = torch.cuda
    tracker_module: Any = tracker
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tracker_module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tracker_module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    log = logging.getLogger(tracker.__name__)
    log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _dispatch_on_host() -> None:
    """Expert parallelism without a CUDA stream: the token counts of the experts are already on the host.

    moe/token_dispatcher.py:444 makes a CUDA stream, :862-900 copies and waits on it.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none on CPU"

    def on_host(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                value = getattr(self, name)
                if torch.is_tensor(value):
                    setattr(self, name, value.numpy())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = on_host


def repair_router_without_engine() -> None:
    """Let the router of experts run without TransformerEngine, whose GEMM moe_utils.py:1192 uses; CPU and GPU."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]
