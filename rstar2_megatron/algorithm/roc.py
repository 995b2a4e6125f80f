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
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from rstar2_megatron.algorithm.penalty import Penalty, load_penalty
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
    is_resampled = config.mode in ("paper", "released")
    measure = load_penalty(config.penalty or (config.mode if is_resampled else "paper"))
    wanted = wanted or [[True] * len(group) for group in groups]
    results = []
    for group, seed, stays in zip(groups, seeds, wanted, strict=True):
        rewards = [_reward(t) for t in group]
        penalties = [measure(t) for t in group]
        indices = [i for i in range(len(group)) if stays[i]]
        reason = _rejection([rewards[i] for i in indices], any(group[i].is_positive for i in indices), config)
        if reason is not Rejection.NONE:
            indices = []
        elif is_resampled and len(indices) > config.down_sample_to_n:
            indices = _choose(group, indices, penalties, config, seed)
        results.append(ResampleResult([group[i] for i in indices], indices, reason, penalties))
    return results


def _rejection(rewards: Sequence[float], is_correct: bool, config: DownSamplingConfig) -> Rejection:
    """Why a group of these rewards is not trained on. is_correct: one of its trajectories is positive."""
    # the tolerance of torch.allclose, which the public code uses
    equal = all(abs(rewards[0] - reward) <= 1e-8 + 1e-5 * abs(reward) for reward in rewards)
    if rewards and equal and config.reject_equal_reward:
        return Rejection.ALL_CORRECT if is_correct else Rejection.ALL_WRONG
    too_few = config.mode == "released" and len(rewards) < config.down_sample_to_n
    return Rejection.TOO_FEW if too_few or not rewards else Rejection.NONE


# -------------------------------------------------------------------------------------------- choice


def _choose(
    group: Sequence[Trajectory], indices: list[int], penalties: list[Penalty], config: DownSamplingConfig, seed: str
) -> list[int]:
    """The G of more than G `indices` to keep, ascending."""
    penalty = [p.error * config.roc_error_ratio + p.answer_format * config.roc_answer_format for p in penalties]
    positives = [i for i in indices if group[i].is_positive]
    negatives = [i for i in indices if not group[i].is_positive]
    if config.mode == "paper":
        # Arrival times Exp(1) / weight (Efraimidis and Spirakis): the k smallest are k draws without replacement, each with
        # probability proportional to the weight among the remaining rollouts.
        draws = _exponential_draws(len(group), seed)
        positives.sort(key=lambda i: draws[i] / (1.0 / (penalty[i] + config.penalty_epsilon)))
        negatives.sort(key=lambda i: draws[i])
        kept = paper_quotas(len(positives), len(negatives), config)
    else:
        positives.sort(key=lambda i: penalty[i])
        kept = released_quotas(len(positives), len(negatives), config)
    chosen = positives[: kept[0]] + negatives[: kept[1]]
    if len(chosen) != config.down_sample_to_n:  # `released` with an odd G
        chosen = sorted(positives + negatives, key=lambda i: penalty[i])[: config.down_sample_to_n]
    return sorted(chosen)


def _exponential_draws(count: int, seed: str) -> list[float]:
    """Exp(1) samples, which depend only on the seed and their number."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big"))
    draws: list[float] = torch.zeros(count, dtype=torch.float64).exponential_(generator=generator).tolist()
    return draws


# -------------------------------------------------------------------------------------------- quotas


def paper_quotas(num_positive: int, num_negative: int, config: DownSamplingConfig) -> tuple[int, int]:
    """(positives, negatives) to keep of a group of more than G rollouts.

    They add up to G. Each is at least its minimum count where the group has that many.
    """
    target = config.down_sample_to_n
    negative = num_negative * target // (num_positive + num_negative)
    negative = max(negative, min(num_negative, config.min_zero_reward_trace_num))
    positive = max(target - negative, min(num_positive, config.min_non_zero_reward_trace_num))
    # The minimum counts add up to at most G, so the reduced side keeps its minimum.
    positive = min(positive, num_positive)
    return positive, min(target - positive, num_negative)


def released_quotas(num_positive: int, num_negative: int, config: DownSamplingConfig) -> tuple[int, int]:
    """(positives, negatives) of the public code; with an odd G they may not add up to G."""
    target, total = config.down_sample_to_n, num_positive + num_negative
    negative = round(num_negative * target / total)  # half to even, as in the public code
    positive = round(num_positive * target / total)
    least = min(num_negative, config.min_zero_reward_trace_num)
    if negative <= least:
        negative, positive = least, target - least
    least = min(num_positive, config.min_non_zero_reward_trace_num)
    if positive <= least:
        positive, negative = least, target - least
    return positive, negative


def _reward(trajectory: Trajectory) -> float:
    if not trajectory.usable:
        raise ValueError(
            f"trajectory {trajectory.query_id}#{trajectory.rollout_index}: spoiled by infrastructure, drop it first"
        )
    if trajectory.reward is None:
        raise ValueError(f"trajectory {trajectory.query_id}#{trajectory.rollout_index} has not been graded")
    return trajectory.reward
