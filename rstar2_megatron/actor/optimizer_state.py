"""Optimizer state in checkpoints: gathered and loaded a parameter at a time, and a check against the weights.

Line numbers refer to megatron-core 0.16.1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import Tensor

from rstar2_megatron.actor.network.model import unwrap

_STATES = ("param", "exp_avg", "exp_avg_sq")


def begin_torch_adam(optimizer: Any) -> None:
    """Give torch's AdamW the state that it has from its first step on, of which megatron-core reads the step (:642)."""
    for adam in _torch_adams(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


def separate_steps(optimizer: Any) -> None:
    """Give each parameter a step of its own: megatron-core loads one for all (:820), which torch's AdamW advances with each."""
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _torch_adams(optimizer: Any) -> Iterator[torch.optim.Adam]:
    """torch's, of distributed optimizers. With TransformerEngine they have its own Adam."""
    for part in optimizer.chained_optimizers:
        if _is_distributed(part) and isinstance(part.optimizer, torch.optim.Adam):
            yield part.optimizer


@contextmanager
def gathered_by(function: Callable[..., Any], optimizer: Any) -> Iterator[None]:
    """Context in which the sharded state dict has its gathered states from `function`: `gather` to save, `shapes` to load."""
    parts = [part for part in optimizer.chained_optimizers if _is_distributed(part)]
    for part in parts:
        part.get_parameter_state_dp_zero = functools.partial(function, part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


def _is_distributed(part: Any) -> bool:
    return hasattr(part, "gbuf_ranges")


def shapes(part: Any, **_: Any) -> dict[int, dict[Any, dict[str, Tensor]]]:
    """What `get_parameter_state_dp_zero` returns, on the meta device.

    megatron-core would allocate masters and moments of all parameters, 12 bytes each, on every rank (:1033). `numel`
    counts the padding between buckets, as do the positions at which megatron-core splits the buffer (:1494).
    """
    return {
        number: {dtype: {name: torch.empty(part.buffers[number].numel, device="meta") for name in _STATES} for dtype in ranges}
        for number, ranges in enumerate(part.gbuf_ranges)
    }


class _Pieces:
    """A state of a buffer's parameters. megatron-core reads `[start:end]`, the position of a parameter, from it (:1494)."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], Tensor] = {}

    def add(self, start: int, end: int, state: Tensor) -> None:
        """Copy the state of the parameter at [start:end] to fp32 host memory of its own."""
        self._pieces[start, end] = state.detach().to("cpu", torch.float32, copy=True)

    def __getitem__(self, position: slice) -> Tensor:
        return self._pieces[position.start, position.stop]


def gather(part: Any, **_: Any) -> dict[int, dict[Any, dict[str, _Pieces]]] | None:
    """What `get_parameter_state_dp_zero` returns, on the first data-parallel rank; None on others. Collective.

    Each state of each parameter is a host tensor of its own. megatron-core gathers all states of a bucket before it joins
    the first (:1051), and returns slices of joined buffers, which its writer must copy: up to 36 bytes of host memory a
    parameter. Here they are 12, and 4 more for a bucket on its way. It also joins buffers without the padding between buckets
    (:1090) and splits them at positions that include it (:1494): every parameter behind a padded bucket would be shifted.
    """
    # TransformerEngine's Adam has no state before its first step.
    if part.optimizer is not None and not part.optimizer.state:
        part.init_state_fn(part.optimizer, part.config)
    group = part.data_parallel_group_gloo
    states_of = _states_of_this_rank if group.size() == 1 else _states_of_all_ranks
    state = {number: {dtype: states_of(part, number) for dtype in ranges} for number, ranges in enumerate(part.gbuf_ranges)}
    return state if group.rank() == 0 else None


def _states_of_this_rank(part: Any, number: int) -> dict[str, _Pieces]:
    """The states of a buffer, all of which this rank holds."""
    pieces = {name: _Pieces() for name in _STATES}
    for parameter, (start, end, _) in part.buffers[number].param_index_map.items():
        states = part._get_main_param_and_optimizer_states(parameter)
        for name in _STATES:
            pieces[name].add(start, end, states[name])
    return pieces


def _states_of_all_ranks(part: Any, number: int) -> dict[str, _Pieces]:
    """The states of a buffer on the first data-parallel rank, nothing on others; collective, over gloo."""
    group, buffer = part.data_parallel_group_gloo, part.buffers[number]
    first, ranks = group.rank() == 0, group.size()
    [ranges] = part.gbuf_ranges[number].values()
    # One memory for all calls: gloo's threads let go of what they sent only a moment after the call.
    largest = max(bucket.grad_data.numel() for bucket in buffer.buckets)
    shard_memory, whole_memory = torch.zeros(largest // ranks), torch.empty(largest if first else 0)
    pieces = {name: _Pieces() for name in _STATES}
    for name in _STATES:
        for at, bucket in enumerate(buffer.buckets):
            size = bucket.grad_data.numel()
            shard, whole = shard_memory[: size // ranks], whole_memory[:size]
            for parameter, place in ranges[at]["param_map"].items():
                own = part._get_main_param_and_optimizer_states(parameter)[name]
                shard[place["gbuf_local"].start : place["gbuf_local"].end].copy_(own.detach())
            received = list(whole.chunk(ranks)) if first else None
            dist.gather(shard, received, dist.get_global_rank(group, 0), group)
            for start, end, bucket_of_parameter in buffer.param_index_map.values():
                if first and bucket_of_parameter == at:
                    pieces[name].add(start, end, whole[start - bucket.offset : end - bucket.offset])
    return pieces


def copy_views(state: Any, live: set[int]) -> None:
    """Give the tensors of a sharded state that are parts of a gathered tensor memory of their own; in place.

    megatron-core splits gate and up of gathered states, and its writer would copy the parts while the whole still lives.
    live: addresses of the storages that are not gathered.
    """
    for tensor in nested_values(state):
        data = getattr(tensor, "data", None)
        if not torch.is_tensor(data) or not data.is_cpu:
            continue
        storage = data.untyped_storage()
        if storage.nbytes() != data.nbytes and storage.data_ptr() not in live:
            tensor.data = data.clone()


PutState = Callable[[Any], None]


def take_held_states(optimizer: Any, state: dict[Any, Any]) -> list[tuple[PutState, Any]]:
    """Take the parameter states out of the optimizer's sharded state dict.

    Returns those of parameters of which this rank updates a part: (function that puts the read state in place, what to read).
    """
    parts = optimizer.chained_optimizers
    held: list[tuple[PutState, Any]] = []
    for number, part in enumerate(parts):
        if _is_distributed(part):
            states = (state if len(parts) == 1 else state[number]).pop("param_state")
            held += [
                (functools.partial(_put, part, parameter, place), states[index])
                for index, parameter, place in _held_parameters(part)
            ]
    return held


def _held_parameters(part: Any) -> Iterator[tuple[int, Tensor, Any]]:
    """(index in the state, parameter, range of it that this rank updates); in megatron-core's order (:2089)."""
    index = itertools.count()
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        maps = [bucket["param_map"] for buckets in ranges.values() for bucket in buckets]
        places = {parameter: place["param"] for each in maps for parameter, place in each.items()}
        for parameter in buffer.param_index_map:
            number = next(index)
            if parameter in places:
                yield number, parameter, places[parameter]


def _put(part: Any, parameter: Tensor, place: Any, state: dict[str, Tensor]) -> None:
    own = {name: tensor.flatten()[place.start : place.end] for name, tensor in state.items()}
    group, index = part.model_param_group_index_map[parameter]
    held = part.optimizer.state[part.optimizer.param_groups[group]["params"][index]]
    if "step" in held:  # torch's AdamW, and the one on the host: megatron-core sets all that they hold (:905)
        own["step"] = held["step"]
    with torch.no_grad():
        part._set_main_param_and_optimizer_states(parameter, own)


def check_state_fits_weights(source: str, chunks: list[Any], optimizer: Any) -> None:
    """Check that the loaded optimizer state matches the loaded weights; collective.

    Raises ValueError on every rank when a master weight does not round to its weight. The next step would then train other
    weights than the saved ones. Masters that share memory with their weights (fp32) are compared with the saved ones by
    the checksums of the weights (`MegatronActor.load_checkpoint`).
    """
    wrong: list[str] = []
    names = {parameter: name for name, parameter in _parameters(chunks)}
    for parameter, weight, master in _masters(optimizer):
        if not torch.equal(master.to(weight.device, weight.dtype), weight):
            wrong.append(names[parameter])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted(set(wrong)))
    found = [f"{name} of rank {rank}" for rank, names_ in enumerate(everywhere) for name in names_]
    if found:
        raise ValueError(
            f"the optimizer state of {source} does not belong to its weights: {len(found)} parameters differ, e.g. "
            f"{', '.join(found[:3])}. Make a Hugging Face directory of its weights by "
            "`python -m rstar2_megatron.actor.convert` and begin from it with a fresh optimizer"
        )


def _parameters(chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
    for number, chunk in enumerate(chunks):
        for name, parameter in unwrap(chunk).named_parameters():
            yield f"{name} (chunk {number})" if len(chunks) > 1 else name, parameter


def _masters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(parameter, flat part that this rank updates, fp32 master of the part) for each parameter with a master."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # nothing to train on this rank
            continue
        for parameter in getattr(part, "model_param_group_index_map", ()):  # the distributed optimizer
            place = part._get_model_param_range_map(parameter)["param"]
            master = part._get_main_param_and_optimizer_states(parameter)["param"]
            yield parameter, parameter.detach().view(-1)[place.start : place.end], master.detach()
        for weights, masters in zip(
            getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True
        ):
            for parameter, master in zip(weights, masters, strict=True):
                yield parameter, parameter.detach(), master.detach()
