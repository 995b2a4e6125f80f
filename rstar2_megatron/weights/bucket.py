"""Buckets of weights: tensors one behind the other in one buffer on their device, in the form of a safetensors file's data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Places = dict[str, tuple[int, tuple[int, ...], torch.dtype]]
"""Offset in bytes, shape and dtype of each tensor."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors in one buffer."""

    data: Tensor
    """uint8 [bytes]."""
    places: Places

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, as views."""
        for name, (offset, shape, dtype) in self.places.items():
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            yield name, self.data[offset : offset + num_bytes].view(dtype).view(shape)


def buckets(named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[tuple[Bucket, bool]]:
    """Copy a stream of tensors into buckets of at most `max_bytes`. The flag marks the last bucket.

    A larger tensor forms its own bucket. A bucket is valid until the next one is asked for, because all of them use one
    buffer. Raises ValueError for an empty stream.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    places: Places = {}
    size = width = 0
    for name, tensor in named_tensors:
        # Tensors of one width are aligned without gaps, which a safetensors file may not have.
        if places and (size + tensor.nbytes > max_bytes or tensor.element_size() != width):
            yield Bucket(buffer[:size], places), False
            places, size = {}, 0
        if size + tensor.nbytes > buffer.numel():
            buffer = torch.empty(max(max_bytes, tensor.nbytes), dtype=torch.uint8, device=tensor.device)
        end, width = size + tensor.nbytes, tensor.element_size()
        buffer[size:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        places[name] = size, tuple(tensor.shape), tensor.dtype
        size = end
    if not places:
        raise ValueError("no weights to send: the stream of named tensors is empty")
    yield Bucket(buffer[:size], places), True
