"""The optimizer step on the host: fp32 master weights and Adam's moments never enter GPU memory.

`actor.optim.optimizer_cpu_offload` (Megatron's and RLinf's name) turns it on. megatron-core's own HybridDeviceOptimizer
needs a GPU and pins all of its memory. HostAdamW implements megatron-core's interface for inner optimizers that own their
master weights: gradients in `.decoupled_grad`, state by `get_unscaled_state` and `set_scaled_state`. Sharding, overlap,
gradient norm and checkpoint format therefore do not change.

A GPU holds 2 bytes of weight and 4 of gradient a parameter. The host holds 12 bytes for each parameter that this rank
updates. Gradients are copied slice by slice through two pinned buffers while the previous slice is updated.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

# Elements of a slice (64 MB of gradients): large enough to hide a transfer's latency, small compared with the state.
SLICE = 1 << 24


class HostAdamW(torch.optim.Optimizer):
    """AdamW for flat device weights [n]; their fp32 master copies and moments [n] are in host memory."""

    def __init__(self, groups: list[dict[str, Any]], threads: int | None = None) -> None:
        """groups: AdamW's parameter groups; "params" are flat device shards of the weights, fp32 or bf16.

        threads: CPU threads of the update; None uses the process's number of threads.
        """
        super().__init__([torch.empty(0)], {})
        self.param_groups = groups  # the base class refuses shards, because they are views
        self._threads = threads
        self._transfers: _Transfers | None = None
        for parameter in self._parameters():
            master = parameter.detach().to("cpu", torch.float32, copy=True)
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                "master_param": master,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update master weights from the gradients in `decoupled_grad` (fp32, on the device), then the device weights."""
        slices = list(self._slices())
        with _cpu_threads(self._threads):
            if any(part.weight.is_cuda for part in slices):
                self._transfers = self._transfers or _Transfers()
                self._transfers.run(slices, _update)
            else:
                for part in slices:
                    _update(part, part.gradient)
                    part.weight.copy_(part.master)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] += 1
                group["step"] = int(state["step"])  # in the group, as TransformerEngine's Adam has it

    def _slices(self) -> Iterator[_Slice]:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None)
                if gradient is None:
                    continue
                state, weight = self.state[parameter], parameter.detach()
                for start in range(0, weight.numel(), SLICE):
                    part = slice(start, start + SLICE)
                    yield _Slice(
                        weight[part],
                        gradient[part],
                        state["master_param"][part],
                        state["exp_avg"][part],
                        state["exp_avg_sq"][part],
                        state["step"],
                        group,
                    )

    # ------------------------------------------------------- interface of the distributed optimizer

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """The state tensor `name`: master_param, exp_avg, exp_avg_sq or step."""
        value = self.state[parameter][name]
        assert isinstance(value, Tensor)
        return value

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Set the state tensor `name`; "param", the checkpoint's name, means master_param."""
        self.state[parameter]["master_param" if name == "param" else name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore hyper-parameters and step count. Tensors are restored by `set_scaled_state`.

        The method of the base class would cast the state to the device and precision of the weights.
        """
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(loaded.get("step") or 0.0))


@dataclass(frozen=True, slots=True)
class _Slice:
    """Views of the same elements [n]: weight and gradient on the device, master and moments on the host."""

    weight: Tensor
    gradient: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    group: dict[str, Any]


def _update(part: _Slice, gradient: Tensor) -> None:
    """AdamW on one slice; `gradient` is fp32 on the host."""
    beta1, beta2 = part.group["betas"]
    adamw(
        [part.master],
        [gradient],
        [part.exp_avg],
        [part.exp_avg_sq],
        [],
        [part.step.clone()],  # a copy: the step counts once for a parameter, not once for a slice
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=part.group["lr"],
        weight_decay=part.group["weight_decay"],
        eps=part.group["eps"],
        maximize=False,
    )


class _Transfers:
    """Copies gradients to the host and weights back through two pinned buffers. Not run on a GPU yet."""

    def __init__(self) -> None:
        self._down, self._up = torch.cuda.Stream(), torch.cuda.Stream()
        self._gradients = [torch.empty(SLICE, pin_memory=True) for _ in range(2)]
        self._weights: dict[torch.dtype, list[Tensor]] = {}
        self._uploaded: list[Any] = [None, None]

    def run(self, slices: list[_Slice], update: Any) -> None:
        """Call update(slice, its gradient on the host) for each slice, then copy the new weights to the device."""
        self._down.wait_stream(torch.cuda.current_stream())
        self._up.wait_stream(torch.cuda.current_stream())
        arriving = self._download(slices[0], 0)
        for number, part in enumerate(slices):
            place = number % 2
            gradient, arrived = arriving
            arrived.synchronize()
            if number + 1 < len(slices):  # the other buffer is free: its slice was updated
                arriving = self._download(slices[number + 1], 1 - place)
            update(part, gradient)
            self._upload(part, place)
        torch.cuda.current_stream().wait_stream(self._up)
        torch.cuda.current_stream().wait_stream(self._down)

    def _download(self, part: _Slice, place: int) -> tuple[Tensor, Any]:
        gradient = self._gradients[place][: part.gradient.numel()]
        with torch.cuda.stream(self._down):
            gradient.copy_(part.gradient, non_blocking=True)
            return gradient, self._down.record_event()

    def _upload(self, part: _Slice, place: int) -> None:
        """The cast to bf16 runs on the host, which halves the bytes of the copy."""
        dtype = part.weight.dtype
        if dtype not in self._weights:
            self._weights[dtype] = [torch.empty(SLICE, dtype=dtype, pin_memory=True) for _ in range(2)]
        if self._uploaded[place] is not None:
            self._uploaded[place].synchronize()
        weight = self._weights[dtype][place][: part.weight.numel()]
        weight.copy_(part.master)
        with torch.cuda.stream(self._up):
            part.weight.copy_(weight, non_blocking=True)
            self._uploaded[place] = self._up.record_event()


@contextmanager
def _cpu_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_of_this_rank() -> int:
    """This rank's equal share of its node's cores; collective. Ray starts every worker with one thread."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return max(1, len(os.sched_getaffinity(0)) // names.count(socket.gethostname()))


def move_to_host(optimizer: Any, *, threads: int | None) -> None:
    """Replace the inner optimizer of every distributed optimizer by a HostAdamW; call it before the first step.

    The fp32 master weights that megatron-core allocated on the device are freed.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:  # nothing to train on this rank
            continue
        groups = [
            {**group, "params": [*whole, *half]}
            for group, whole, half in zip(
                part.optimizer.param_groups, part.shard_fp32_groups, part.shard_float16_groups, strict=True
            )
        ]
        # With this flag megatron-core leaves the master weights to the inner optimizer. It is set here, because the
        # settings from which megatron-core derives it need TransformerEngine's Adam.
        part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        part.shard_fp32_from_float16_groups = [[None] * len(group) for group in part.shard_float16_groups]
        for group in part.model_float16_groups:
            for parameter in group:
                parameter.main_param = None
        part.optimizer = HostAdamW(groups, threads)
