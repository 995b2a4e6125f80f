"""A checksum of a tensor's bytes that actor and engine can both compute in place, on CPU or GPU.

Step-0 gate: after a weight sync the engine must hold exactly the actor's weights. A sum over floats cannot show that (order
of summation, NaN). This checksum is a wrapping 63-bit sum over the raw words. Each word is multiplied by a number that
depends on its position, so that swapped, shifted or truncated data changes the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_WORDS_AT_A_TIME = 1 << 22  # 4 Mi words: 64 MB of temporaries, also for the largest embedding
_MULTIPLIER = 2654435761  # odd, so multiplication by it is a bijection of the 64-bit integers
_MASK = (1 << 63) - 1
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def tensor_checksum(tensor: Tensor) -> int:
    """Checksum of `tensor`'s elements in row-major order, bit by bit, in [0, 2**63).

    Two tensors of equal dtype and size have equal checksums exactly when all bits are equal (up to collisions). Device,
    strides and shape have no influence. Cast both tensors to the dtype of the weight sync before comparing.
    """
    words = tensor.detach().contiguous().reshape(-1).view(_WORD[tensor.element_size()])
    total = words.numel()
    for start in range(0, words.numel(), _WORDS_AT_A_TIME):
        part = words[start : start + _WORDS_AT_A_TIME].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=part.device)
        place.mul_(_MULTIPLIER).bitwise_or_(1)
        total = (total + int(part.mul_(place).sum().item())) & _MASK
    return total & _MASK


def weights_checksum(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Checksum of every tensor by name."""
    return {name: tensor_checksum(tensor) for name, tensor in named_tensors}


def check_same_weights(source: str, saved: Mapping[str, int], loaded: Mapping[str, int]) -> None:
    """Raise ValueError unless the weights loaded from `source` equal the saved ones.

    saved, loaded: `weights_checksum` by Hugging Face name.
    """
    differing = sorted(name for name in saved.keys() | loaded.keys() if saved.get(name) != loaded.get(name))
    if differing:
        raise ValueError(
            f"{source}: {len(differing)} of {len(saved)} weights are not those that were saved, e.g. "
            f"{', '.join(differing[:3])}; the checkpoint is damaged, or saved from another model or precision: "
            "choose another global_step_N by runner.resume_dir"
        )
