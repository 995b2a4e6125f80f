"""The loss of a process preference model: Bradley-Terry over the scores of prefixes (arXiv 2501.04519, section 3.3).

A comparison holds the prefixes of one step and the pairs (better, worse) among them. Its loss is the mean over its pairs of
-log sigmoid(score of the better - score of the worse); a batch is the mean over its comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rstar2_megatron.algorithm.batch import TrainSequence


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Token ids: what the prefixes share, and how each goes on. `pairs` are (better, worse) indices of continuations."""

    shared: np.ndarray  # [tokens] int32
    continuations: list[np.ndarray]
    pairs: list[tuple[int, int]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prefix."""
        return [len(self.shared) + len(own) for own in self.continuations]

    def sequences(self) -> list[TrainSequence]:
        return [score_sequence(np.concatenate([self.shared, own])) for own in self.continuations]


def score_sequence(ids: np.ndarray) -> TrainSequence:
    """A prefix to be scored; it has no trained token, because its last position gives the score."""
    count = len(ids)
    return TrainSequence(np.asarray(ids, np.int32), np.zeros(count, np.uint8), np.zeros(count, np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of a batch whose prefixes are numbered through, comparison by comparison."""

    sizes: np.ndarray  # [comparisons] prefixes of each
    better: np.ndarray  # [pairs] number of a prefix
    worse: np.ndarray  # [pairs]
    comparison: np.ndarray  # [pairs] number of the comparison

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> Pairs:
        sizes = np.array([len(comparison.continuations) for comparison in comparisons], np.int64)
        first = np.cumsum(sizes) - sizes
        rows = [
            (first[number] + better, first[number] + worse, number)
            for number, comparison in enumerate(comparisons)
            for better, worse in comparison.pairs
        ]
        table = np.array(rows, np.int64).reshape(-1, 3)
        return cls(sizes, table[:, 0], table[:, 1], table[:, 2])

    @property
    def weights(self) -> np.ndarray:
        """float64 [pairs], summing to 1: every comparison counts alike, and so do the pairs of a comparison."""
        counts = np.bincount(self.comparison, minlength=len(self.sizes))
        return 1.0 / (counts[self.comparison] * len(self.sizes))

    @property
    def ranges(self) -> list[range]:
        """The prefixes of each comparison."""
        ends = np.cumsum(self.sizes).tolist()
        return [range(end - size, end) for end, size in zip(ends, self.sizes.tolist())]


def check_room(largest: int, room: int) -> None:
    """Raise ValueError when the prefixes of the largest comparison do not fit a micro-batch of `room` tokens."""
    if largest > room:
        raise ValueError(
            f"the prefixes of one comparison have {largest} tokens, a micro-batch has room for {room}: raise "
            "runner.max_tokens_per_mbs (times actor.model.context_parallel_size) or lower preference.max_length"
        )


def preference_loss(scores: Tensor, better: Tensor, worse: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over pairs of -log sigmoid(scores[better] - scores[worse]).

    scores [n] fp32; better, worse [pairs] index them; weights [pairs]. With all scores equal and weights that sum to 1 it
    is ln 2.
    """
    return (weights * F.softplus(scores[worse] - scores[better])).sum()


def pair_figures(scores: Tensor, better: Tensor, worse: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Weighted sums over pairs: how many are in the right order (half of a tie), and the margins of their scores."""
    margin = (scores[better] - scores[worse]).detach()
    order = (torch.sign(margin) + 1) / 2
    return {"pair_accuracy": (weights * order).sum(), "pair_margin": (weights * margin).sum()}
