"""Free the GPU for the engine between training steps: weights, gradients, optimizer state to host memory.

On CPU the same moves are made (into other host memory), so that the order of a step is exercised there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def offload(chunks: list[Any], optimizer: Any, parts: set[str], *, masters: bool) -> None:
    """Move parts ("weights", "grads", "state") to the host and give the memory back to the device.

    Gradient buffers are not copied: they are zeroed before their next use. `masters`: the fp32 master weights
    are tensors of their own (bf16 training) and go with the state; in fp32 training they are the weights.
    """
    torch.cuda.synchronize()
    for buffer in _buffers(chunks):
        on_host = buffer.param_data is not None and not buffer.param_data.is_cuda
        if "weights" in parts and on_host and buffer.param_data_cpu is None:
            # megatron-core would take the tensor itself for its copy on the host.
            buffer.param_data_cpu = torch.empty_like(buffer.param_data)
        buffer.offload_to_cpu(move_params="weights" in parts, move_grads="grads" in parts)
    if "state" in parts:
        _move_state(optimizer, "cpu", masters)
    torch.cuda.synchronize()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reload(chunks: list[Any], optimizer: Any, parts: set[str], *, masters: bool, device: str) -> None:
    """Undo `offload`; `device` is where the state goes ("cuda", "cpu")."""
    for buffer in _buffers(chunks):
        buffer.reload_from_cpu(move_params="weights" in parts, move_grads="grads" in parts)
    if "state" in parts:
        _move_state(optimizer, device, masters)
    torch.cuda.synchronize()


def _buffers(chunks: list[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers


def _move_state(optimizer: Any, device: str, masters: bool) -> None:
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            for name, value in state.items():
                # torch keeps Adam's step counter on the host, and wants it there.
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[name] = value.to(device)
        if masters:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data.to(device)
