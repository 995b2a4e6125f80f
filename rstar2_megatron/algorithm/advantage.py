"""Group-relative advantages over the kept trajectories of each problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rstar2_megatron.extension.choice import resolve
from rstar2_megatron.extension.user_code import UserCode, UserCodeError

EPSILON = 1e-6

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards [groups, G] float64, valid [groups, G] bool) -> advantages [groups, G]; what stands where `valid` is False is
ignored."""


def grpo(rewards: Tensor, valid: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) with the unbiased std, as the paper and both public codes."""
    centred, size = _centred(rewards, valid)
    std = (centred.square().sum(1, keepdim=True) / (size - 1).clamp(min=1)).sqrt()
    return centred / (std + EPSILON)


def grpo_no_std(rewards: Tensor, valid: Tensor) -> Tensor:
    """r - mean."""
    return _centred(rewards, valid)[0]


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """r - mean of the other trajectories."""
    centred, size = _centred(rewards, valid)
    return centred * size / (size - 1).clamp(min=1)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "grpo-no-std": grpo_no_std, "leave-one-out": leave_one_out}
"""By their names in `algorithm.adv_type`. A group of one rollout or of equal rewards gets zeros from each."""


def _centred(rewards: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(r - mean [groups, G], sizes of the groups [groups, 1])."""
    size = valid.sum(1, keepdim=True)
    mean = torch.where(valid, rewards, 0.0).sum(1, keepdim=True) / size.clamp(min=1)
    # Equal rewards get exact zeros; rounding of the mean would give 1e-17 / 1e-6.
    highest = rewards.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    equal = highest == rewards.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    return torch.where(valid & ~equal, rewards - mean, 0.0), size


def _pad(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """(values, valid), float64 and bool, both `[len(rows), longest row]`; rows are padded with 0 at the end."""
    width = max(map(len, rows), default=0)
    values = [[*row, *([0.0] * (width - len(row)))] for row in rows]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    valid = torch.arange(width) < lengths[:, None]
    return torch.tensor(values, dtype=torch.float64).reshape(len(rows), width), valid


def group_advantages(groups: Sequence[Sequence[float]], kind: str | UserCode = "grpo") -> list[list[float]]:
    """Advantages of the rewards of each kept group; groups may have any size. kind: of `algorithm.adv_type`.

    Raises ValueError for an unknown kind or rewards that are not finite, UserCodeError for a wrong result of the user's.
    """
    function = resolve("algorithm.adv_type", kind, ADVANTAGES, "rewards, valid")
    rewards, valid = _pad([group for group in groups if group])  # a rejected group has none, of which no minimum can be taken
    if not torch.isfinite(rewards[valid]).all():
        raise ValueError(f"rewards must be finite, got {rewards[valid].tolist()}")
    if not rewards.numel():
        return [[] for _ in groups]
    advantages = function(rewards, valid)
    if isinstance(kind, UserCode):
        _check(advantages, rewards, valid, f"algorithm.adv_type={kind.label}")
    rows = iter(advantages.tolist())
    return [next(rows)[: len(group)] if group else [] for group in groups]


def check_own_advantage(code: UserCode) -> None:
    """Try a function of the user's on a few rewards, some groups smaller than others, one of equal rewards and one of a
    single trajectory.

    Raises UserCodeError, also where what stands in places that are not valid decides the result.
    """
    function = resolve("algorithm.adv_type", code, ADVANTAGES, "rewards, valid")
    rewards, valid = _pad([[1.0, 0.0, 0.5], [0.0, 1.0], [0.0, 0.0, 0.0], [1.0]])
    found = []
    for padding in (0.0, 7.0):
        padded = torch.where(valid, rewards, padding)
        torch.manual_seed(0)
        advantages = function(padded.clone(), valid.clone())
        _check(advantages, padded, valid, f"algorithm.adv_type={code.label}")
        found.append(torch.where(valid, advantages, 0.0))
    for row in (found[0] != found[1]).any(1).nonzero().flatten().tolist():
        raise UserCodeError(
            f"algorithm.adv_type={code.label} returned {found[0][row].tolist()} and {found[1][row].tolist()} for the rewards "
            f"{rewards[row].tolist()}, valid {valid[row].tolist()}, and other numbers where it is False; leave those places out"
        )


def _check(advantages: object, rewards: Tensor, valid: Tensor, shown: str) -> None:
    expected = f"a tensor [groups, G] of shape {tuple(rewards.shape)}"
    if not isinstance(advantages, Tensor):
        raise UserCodeError(f"{shown} returned a {type(advantages).__name__}; return {expected}")
    if advantages.shape != rewards.shape:
        raise UserCodeError(f"{shown} returned the shape {tuple(advantages.shape)}; return {expected}")
    for row in (valid & ~torch.isfinite(advantages)).any(1).nonzero().flatten().tolist():
        theirs, given = (values[row][valid[row]].tolist() for values in (advantages, rewards))
        raise UserCodeError(f"{shown} returned {theirs} for the rewards {given} of a group")
