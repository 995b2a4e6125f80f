"""Group-relative advantages over the kept trajectories of each problem."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rstar2_megatron.algorithm.ragged import pad_rows

EPSILON = 1e-6
ADVANTAGES = ("grpo", "grpo-no-std", "leave-one-out")


def group_advantages(groups: Sequence[Sequence[float]], kind: str = "grpo") -> list[list[float]]:
    """Advantages of the rewards of each kept group; groups may have any size. See `batched_advantages`."""
    rewards, valid = pad_rows(groups)
    advantages = batched_advantages(rewards, valid, kind).tolist()
    return [row[: len(group)] for row, group in zip(advantages, groups)]


def batched_advantages(rewards: Tensor, valid: Tensor, kind: str = "grpo") -> Tensor:
    """Advantages `[groups, G]` of rewards `[groups, G]`, same dtype, 0 where `valid` (bool, same shape) is False.

    - grpo: (r - mean) / (std + 1e-6) with the unbiased std, as the paper and both public codes.
    - grpo-no-std: r - mean.
    - leave-one-out: r - mean of the other trajectories.
    A group of one rollout or of equal rewards gets zeros. Raises ValueError for an unknown kind or rewards that are not
    finite.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"unknown advantage {kind!r}; known: {', '.join(ADVANTAGES)}")
    if not torch.isfinite(rewards[valid]).all():
        raise ValueError(f"rewards must be finite, got {rewards[valid].tolist()}")
    if not rewards.numel():
        return torch.zeros_like(rewards)
    size = valid.sum(1, keepdim=True)
    mean = torch.where(valid, rewards, 0.0).sum(1, keepdim=True) / size.clamp(min=1)
    centred = torch.where(valid, rewards - mean, 0.0)
    # Equal rewards get exact zeros; rounding of the mean would give 1e-17 / 1e-6.
    highest = rewards.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    equal = highest == rewards.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    others = (size - 1).clamp(min=1)
    if kind == "grpo":
        std = (centred.square().sum(1, keepdim=True) / others).sqrt()
        centred = centred / (std + EPSILON)
    elif kind == "leave-one-out":
        centred = centred * size / others
    return torch.where(equal, 0.0, centred)
