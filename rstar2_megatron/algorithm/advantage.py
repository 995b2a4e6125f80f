"""Group-relative advantages over the kept trajectories of one problem."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6
ADVANTAGES = ("grpo", "grpo-no-std", "leave-one-out")


def group_advantages(rewards: Sequence[float] | Tensor, kind: str = "grpo") -> list[float]:
    """Advantage of each trajectory of one kept group. See `batched_advantages`."""
    tensor = torch.as_tensor(rewards, dtype=torch.float64)
    if tensor.ndim != 1:
        raise ValueError(f"rewards of one group must be flat, got shape {tuple(tensor.shape)}")
    return batched_advantages(tensor[None], kind)[0].tolist()


def batched_advantages(rewards: Tensor, kind: str = "grpo") -> Tensor:
    """Advantages `[groups, G]` of rewards `[groups, G]`, same dtype.

    - grpo: (r - mean) / (std + 1e-6) with the unbiased std, as the paper and both public codes.
    - grpo-no-std: r - mean.
    - leave-one-out: r - mean of the other trajectories.
    A group of one, or of equal rewards, gets zeros. Raises ValueError for an unknown kind or rewards that are
    not finite.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"unknown advantage {kind!r}; known: {', '.join(ADVANTAGES)}")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    size = rewards.shape[-1]
    if size < 2:
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean(-1, keepdim=True)
    # Rounding of the mean would leave 1e-17 / 1e-6 where all rewards are equal.
    equal = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    if kind == "grpo":
        centred = centred / (rewards.std(-1, unbiased=True, keepdim=True) + EPSILON)
    elif kind == "leave-one-out":
        centred = centred * (size / (size - 1))
    return torch.where(equal, torch.zeros_like(centred), centred)
