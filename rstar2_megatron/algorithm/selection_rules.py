"""Rules beside resample-on-correct: which of a group's trajectories are kept."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

from rstar2_megatron.trajectory import Group

Choose = Callable[[Group, int, random.Random], list[int]]
"""(group, count, rng) -> indices of at most `count` of `group.trajectories`, which are usable and graded."""


def max_variance(group: Group, count: int, rng: random.Random) -> list[int]:
    """PODS (arXiv 2504.13818, theorem 3.1): the `count` trajectories whose rewards have the largest variance.

    They are the k highest and the count - k lowest rewards for some k. Equal rewards are drawn by `rng`; of equal variances
    the one with more of the lowest rewards counts.
    """
    rewards = [t.reward or 0.0 for t in group.trajectories]
    order = sorted(range(len(rewards)), key=lambda i: (rewards[i], rng.random()))
    most = min(count, len(order))
    choices = [order[: most - k] + order[len(order) - k :] for k in range(most + 1)]
    return max(choices, key=lambda chosen: statistics.pvariance([rewards[i] for i in chosen]) if chosen else 0.0)


def uniform(group: Group, count: int, rng: random.Random) -> list[int]:
    """`count` of them at random: resample-on-correct without its preference, for comparison."""
    size = len(group.trajectories)
    return rng.sample(range(size), min(count, size))


RULES: dict[str, Choose] = {"max_variance": max_variance, "uniform": uniform}
"""By their names in `algorithm.down_sampling.down_sampling_config.mode`."""
