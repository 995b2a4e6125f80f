"""Optimizer state in checkpoints: where megatron-core's gathered state really lies, and whether it fits the weights.

Line numbers in comments are of megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rstar2_megatron.actor.network.model import bare
from rstar2_megatron.weights.checksum import tensor_checksum

Position = tuple[int, int, int]
"""(start, end, bucket) of a parameter in its buffer, in elements."""


@contextmanager
def positions_without_padding(chunks: list[Any]) -> Iterator[None]:
    """Inside, megatron-core cuts gathered optimizer state where each parameter really lies.

    The distributed optimizer gathers a buffer's masters and moments without the padding between its buckets
    (distrib_optimizer.py:1090), then cuts them at positions that count this padding (:1494). Without this context every
    parameter behind a padded bucket would be saved shifted, and a resumed run would train shifted weights. A tied
    embedding of a pipeline has a bucket of its own, and overlapped communication makes many buckets: both can be padded.
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
    """Position of each parameter of the buffer, not counting the padding at the end of each bucket."""
    padding_before, gathered = [], 0
    for bucket, (start, _) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
        padding_before.append(start - gathered)
        gathered += bucket.numel_unpadded
    return {
        parameter: (start - padding_before[bucket], end - padding_before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def local_checksums(chunks: list[Any]) -> dict[str, int]:
    """Checksum of each parameter of this rank by its name and chunk. Local."""
    return {name: tensor_checksum(parameter) for name, parameter in _parameters(chunks)}


def check_state_fits_weights(source: str, chunks: list[Any], optimizer: Any, loaded: dict[str, int]) -> None:
    """The optimizer state just loaded must belong to the weights just loaded; collective.

    loaded: `local_checksums` after the weights were loaded and before the optimizer state was. Raises ValueError on
    every rank when loading the state changed a weight, or when a master weight does not round to its weight: the
    next step would train other weights than were saved.
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
        for name, parameter in bare(chunk).named_parameters():
            yield f"{name} (chunk {number})" if len(chunks) > 1 else name, parameter


def _masters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(parameter, flat part of it that this rank updates, fp32 master of this part) for each that has a master."""
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
