"""Resample-on-correct: of the 2G rollouts of each problem, choose the G that are trained on.

Paper (arXiv 2508.20722, section 2.2.3). Negatives (reward 0; in general, at most `reward.positive_above`) are halved
uniformly, so that the policy sees every kind of failure. Positives are halved with a preference for clean ones: a
trajectory's penalty is `p_err + p_format` (`penalty.py`), and positives are drawn with probability inverse to it.

`paper`: positives are drawn one by one without replacement. The probability of each draw is proportional to
`1 / (penalty + penalty_epsilon)` among the remaining positives. Negatives are drawn uniformly. Tool errors are typed
outcomes, turns are the trajectory's turns. Quotas: `floor(negatives * G / n)` negatives, the rest positives. The YAML's
minimum counts apply too (0 gives the paper's plain halves). Without them a group with one wrong rollout in 32 would keep no
negative, and all its advantages would be zero.

`released`: the same kept indices as the public code. Positives are sorted by penalty, and the first ones are kept. Of the
negatives the first in rollout order are kept. Tool errors are found by substring in the tool response, turns are counted
in the response text, quotas are rounded half to even.

Cases in which the public code asserts or crashes:
- no group survives: every result is `rejected`; the caller skips the update and counts it;
- quotas do not add up to G (odd G): RLinf's rule, the G lowest penalties of positives and negatives together, with a
  stable sort (verl's recipe asserts);
- fewer than G usable rollouts (infrastructure dropped some): `released` drops the group as the public code does, `paper`
  keeps all of them. With exactly G usable rollouts both modes keep all.

All groups of a step are computed at once as tensors `[groups, rollouts]`. Smaller groups are padded, with `valid` False on
the padding. `choose` gives every rollout a key and every kind (positive, negative) a quota; the rollouts with the smallest
keys fill the quota. The modes differ only in keys and quotas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from rstar2_megatron.algorithm.penalty import Penalty, load_penalty
from rstar2_megatron.algorithm.ragged import pad_rows
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import Trajectory


class Rejection(StrEnum):
    """The reason for which a group is not trained on."""

    NONE = ""
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    TOO_FEW = "too_few"  # fewer usable rollouts than G (released), none at all, or none that a rule of the user's keeps


@dataclass(slots=True)
class ResampleResult:
    """Result for one group. `indices` are ascending positions in the given list of trajectories."""

    kept: list[Trajectory]
    indices: list[int]
    reason: Rejection = Rejection.NONE
    penalties: list[Penalty] = field(default_factory=list)
    """One per given trajectory, whether kept or not."""
    filtered: dict[str, int] = field(default_factory=dict)
    """By the name of each filter, how many trajectories it left out (`selection`)."""

    @property
    def rejected(self) -> bool:
        return self.reason is not Rejection.NONE

    def keep(self, indices: Sequence[int]) -> None:
        """Keep these of `kept` alone, by their places there; a group without any is rejected."""
        self.kept, self.indices = [self.kept[i] for i in indices], [self.indices[i] for i in indices]
        self.reason = Rejection.NONE if indices else Rejection.TOO_FEW


def resample_on_correct(
    groups: Sequence[Sequence[Trajectory]],
    config: DownSamplingConfig,
    seeds: Sequence[str],
    wanted: Sequence[Sequence[bool]] | None = None,
) -> list[ResampleResult]:
    """Choose `config.down_sample_to_n` of the graded, usable trajectories of each problem, in rollout order.

    A group that is not rejected stays whole under another `config.mode` than `paper` and `released`.
    seeds: one text per group, for the draws of `paper` mode. The same group with the same seed keeps the same rollouts,
        independently of the other groups of the step.
    wanted: False for trajectories that a filter leaves out; None: all are wanted.
    Raises ValueError for a trajectory that is not graded or that infrastructure spoiled.
    """
    if len(groups) != len(seeds):
        raise ValueError(f"{len(groups)} groups but {len(seeds)} seeds")
    rewards, valid = pad_rows([[_reward(t) for t in group] for group in groups])
    is_resampled = config.mode in ("paper", "released")
    measure = load_penalty(config.penalty or (config.mode if is_resampled else "paper"))
    penalties = [[measure(t) for t in group] for group in groups]
    draws = exponential_draws(valid, seeds) if config.mode == "paper" else None
    if wanted is not None:
        valid = valid & pad_rows(wanted)[0].bool()

    positive = pad_rows([[t.is_positive for t in group] for group in groups])[0].bool() & valid
    reasons = rejections(rewards, positive, valid, config)
    kept = valid
    if is_resampled:
        errors, _ = pad_rows([[p.error for p in row] for row in penalties])
        formats, _ = pad_rows([[p.answer_format for p in row] for row in penalties])
        totals = errors * config.roc_error_ratio + formats * config.roc_answer_format
        kept = choose(positive, totals, valid, config, draws)

    results = []
    for group, row, reason, of_group in zip(groups, kept.tolist(), reasons, penalties):
        indices = [i for i, is_kept in enumerate(row) if is_kept and reason is Rejection.NONE]
        results.append(ResampleResult([group[i] for i in indices], indices, reason, of_group))
    return results


def rejections(rewards: Tensor, positive: Tensor, valid: Tensor, config: DownSamplingConfig) -> list[Rejection]:
    """The Rejection of each group of `[groups, rollouts]`; `Rejection.NONE` for groups that are trained on."""
    size = valid.sum(1)
    # isclose has the tolerance of torch.allclose, which the public code uses.
    first = rewards.gather(1, valid.int().argmax(1, keepdim=True)) if rewards.numel() else rewards[:, :1]
    equal = (torch.isclose(first, rewards) | ~valid).all(1) & config.reject_equal_reward
    correct = positive.any(1)
    too_few = (size < config.down_sample_to_n) & (config.mode == "released")
    reasons = []
    for n, is_equal, is_correct, is_too_few in zip(size.tolist(), equal.tolist(), correct.tolist(), too_few.tolist()):
        if n and is_equal:
            reasons.append(Rejection.ALL_CORRECT if is_correct else Rejection.ALL_WRONG)
        else:
            reasons.append(Rejection.TOO_FEW if is_too_few or not n else Rejection.NONE)
    return reasons


# -------------------------------------------------------------------------------------------- choice


def choose(
    positive: Tensor, penalties: Tensor, valid: Tensor, config: DownSamplingConfig, draws: Tensor | None = None
) -> Tensor:
    """Mask of the rollouts to keep; every tensor is `[groups, rollouts]`. Groups of at most G rollouts keep all.

    positive: bool, False on the padding.
    draws: independent Exp(1) samples, for `paper` mode.
    """
    target = config.down_sample_to_n
    negative = valid & ~positive
    num_positive, num_negative = positive.sum(1), negative.sum(1)
    if config.mode == "paper":
        assert draws is not None, "paper mode draws at random"
        # Arrival times Exp(1) / weight (Efraimidis and Spirakis): the k smallest are k draws without replacement, each with
        # probability proportional to the weight among the remaining rollouts.
        keys = draws / torch.where(positive, 1.0 / (penalties + config.penalty_epsilon), 1.0)
        quotas = paper_quotas(num_positive, num_negative, config)
    else:
        keys = torch.where(positive, penalties, 0.0)  # negatives have equal keys, so they stay in rollout order
        quotas = released_quotas(num_positive, num_negative, config)
    chosen = smallest(keys, positive, quotas[0]) | smallest(keys, negative, quotas[1])

    if config.mode == "released":
        # Sorted by penalty; at equal penalties positives come first.
        lowest = (ranks(~valid, penalties, negative) < target) & valid
        chosen = torch.where((chosen.sum(1) == target)[:, None], chosen, lowest)
    return torch.where((valid.sum(1) <= target)[:, None], valid, chosen)


def smallest(keys: Tensor, among: Tensor, counts: Tensor) -> Tensor:
    """Mask of the `counts` smallest keys of each row within the mask `among`; ties in rollout order."""
    return among & (ranks(~among, keys) < counts[:, None])


def ranks(*keys: Tensor) -> Tensor:
    """Rank of each rollout in its row, sorted by the first key, then by the next, then in rollout order."""
    order = torch.arange(keys[0].shape[1]).expand(keys[0].shape)
    for key in reversed(keys):
        order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
    return order.argsort(dim=1)


def exponential_draws(valid: Tensor, seeds: Sequence[str]) -> Tensor:
    """Exp(1) samples `[groups, rollouts]`. A group's samples depend only on its seed and its size."""
    draws = torch.zeros(valid.shape, dtype=torch.float64)
    generator = torch.Generator()
    for row, size, seed in zip(draws, valid.sum(1).tolist(), seeds, strict=True):
        generator.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big"))
        row[:size].exponential_(generator=generator)
    return draws


# -------------------------------------------------------------------------------------------- quotas


def paper_quotas(num_positive: Tensor, num_negative: Tensor, config: DownSamplingConfig) -> tuple[Tensor, Tensor]:
    """(positives, negatives) to keep, `[groups]` each, for groups of more than G rollouts.

    They add up to G. Each is at least its minimum count where the group has that many.
    """
    target = config.down_sample_to_n
    negative = num_negative * target // (num_positive + num_negative).clamp(min=1)
    negative = negative.maximum(num_negative.clamp(max=config.min_zero_reward_trace_num))
    positive = target - negative
    positive = positive.maximum(num_positive.clamp(max=config.min_non_zero_reward_trace_num))
    # The minimum counts add up to at most G, so the reduced side keeps its minimum.
    positive = positive.minimum(num_positive)
    return positive, (target - positive).minimum(num_negative)


def released_quotas(num_positive: Tensor, num_negative: Tensor, config: DownSamplingConfig) -> tuple[Tensor, Tensor]:
    """(positives, negatives) of the public code, `[groups]` each; with an odd G they may not add up to G."""
    target = config.down_sample_to_n
    total = (num_positive + num_negative).clamp(min=1).double()
    negative = torch.round(num_negative * target / total).long()  # half to even, as in the public code
    positive = torch.round(num_positive * target / total).long()
    least = num_negative.clamp(max=config.min_zero_reward_trace_num)
    few = negative <= least
    negative, positive = torch.where(few, least, negative), torch.where(few, target - least, positive)
    least = num_positive.clamp(max=config.min_non_zero_reward_trace_num)
    few = positive <= least
    return torch.where(few, least, positive), torch.where(few, target - least, negative)


def _reward(trajectory: Trajectory) -> float:
    if not trajectory.usable:
        raise ValueError(
            f"trajectory {trajectory.query_id}#{trajectory.rollout_index}: spoiled by infrastructure, drop it first"
        )
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.query_id}#{trajectory.rollout_index} has not been graded")
    return trajectory.reward
