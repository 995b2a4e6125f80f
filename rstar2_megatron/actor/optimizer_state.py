"""Optimizer state in checkpoints: corrected positions for megatron-core's gathered state, and a check against the weights.

Line numbers refer to megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rstar2_megatron.actor.network.model import unwrap
from rstar2_megatron.weights.checksum import tensor_checksum

Position = tuple[int, int, int]
"""(start, end, bucket) of a parameter in its buffer, in elements."""


@contextmanager
def positions_without_padding(chunks: list[Any]) -> Iterator[None]:
    """Context in which megatron-core splits gathered optimizer state at the correct positions.

    The distributed optimizer gathers a buffer's masters and moments without the padding between buckets
    (distrib_optimizer.py:1090), but splits them at positions that include this padding (:1494). Without this context every
    parameter after a padded bucket would be saved shifted, and a resumed run would train shifted weights. Several buckets
    exist with overlapped communication and with a tied embedding in a pipeline.
    """
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    padded = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _unpadded_positions(buffer)
        yield
    finally:
        for buffer, positions in zip(buffers, padded, strict=True):
            buffer.param_index_map = positions


def _unpadded_positions(buffer: Any) -> dict[Any, Position]:
    """Position of each parameter in the buffer without the padding at the end of each bucket."""
    padding_before, gathered = [], 0
    for bucket, (start, _) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
        padding_before.append(start - gathered)
        gathered += bucket.numel_unpadded
    return {
        parameter: (start - padding_before[bucket], end - padding_before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def local_checksums(chunks: list[Any]) -> dict[str, int]:
    """Checksum of each parameter of this rank by chunk and name. Local."""
    return {name: tensor_checksum(parameter) for name, parameter in _parameters(chunks)}


def check_state_fits_weights(source: str, chunks: list[Any], optimizer: Any, loaded: dict[str, int]) -> None:
    """Check that the loaded optimizer state matches the loaded weights; collective.

    loaded: `local_checksums` taken between loading the weights and loading the state. Raises ValueError on every rank when
    loading the state changed a weight, or when a master weight does not round to its weight. The next step would then
    train other weights than the saved ones.
    """
    wrong = [name for name, checksum in local_checksums(chunks).items() if checksum != loaded[name]]
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
            f"{', '.join(found[:3])}. Earlier revisions of this program wrote such checkpoints where a pipeline has tied "
            "embeddings or communication is overlapped. Their weights are right: make a Hugging Face directory of them by "
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
