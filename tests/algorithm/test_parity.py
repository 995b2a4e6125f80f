"""One frozen group from trajectories to loss, every number by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rstar2_megatron.algorithm.advantage import group_advantages
from rstar2_megatron.algorithm.loss import aggregate
from rstar2_megatron.algorithm.roc import resample_on_correct
from rstar2_megatron.settings.schema import DownSamplingConfig
from rstar2_megatron.trajectory import ToolOutcome
from tests.algorithm.tokens import clipped_loss
from tests.algorithm.trajectories import num_kept_positive, trajectory

OK, ERROR = ToolOutcome.OK, ToolOutcome.ERROR

# 8 rollouts to 4. Penalties of the positives 1, 2, 4, 6: no tool 0.5 + uncounted turn 1, clean 0, one error of one call 1,
# one of two 0.5. Quotas round(4 * 4 / 8) = 2 and 2: positives 2 and 6, the first negatives 0 and 3.
GROUP = [
    trajectory(0.0, [OK]),
    trajectory(1.0, []),
    trajectory(1.0, [OK]),
    trajectory(0.0, [OK]),
    trajectory(1.0, [ERROR]),
    trajectory(0.0, []),
    trajectory(1.0, [OK, ERROR]),
    trajectory(0.0, [OK]),
]
KEPT = [0, 2, 3, 6]
TOKENS = [1, 2, 3, 4]  # trained tokens of the kept ones, packed as (0, 2) and (3, 6)
# rewards 0 1 0 1: mean 1/2, unbiased std sqrt(4 * (1/4) / 3) = 1 / sqrt(3)
A = 0.5 / (1 / math.sqrt(3) + 1e-6)


@pytest.fixture
def advantages() -> list[float]:
    config = DownSamplingConfig(down_sample_to_n=4, mode="released")
    (result,) = resample_on_correct([GROUP], config, [""])
    assert [p.error + p.answer_format for p in result.penalties] == [0, 1.5, 0, 0, 1, 1.5, 0.5, 0]
    assert result.indices == KEPT
    assert num_kept_positive(result) == 2
    return group_advantages([[t.reward or 0.0 for t in result.kept]])[0]


def test_advantages(advantages: list[float]) -> None:
    assert advantages == pytest.approx([-A, A, -A, A], rel=1e-12)
    assert pytest.approx(0.8660239, abs=1e-6) == A


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", A * (1 - 2 + 3 - 4) / 10),
        ("seq-mean-token-mean", 0.0),
        ("seq-mean-token-sum", A * (1 - 2 + 3 - 4) / 4),
        ("released-rlinf", (A * (1 - 2) / 3 + A * (3 - 4) / 7) / 2),
        ("released-verl", (2 * A * (1 - 2) / 3 + 2 * A * (3 - 4) / 7) / 8),  # 8 rows before resampling
    ],
)
def test_losses_at_ratio_one(advantages: list[float], kind: str, expected: float) -> None:
    weights = aggregate(kind, TOKENS, microbatch_of=[0, 0, 1, 1], mini_batch_rows=8)

    def per_token(values: list[float] | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(TOKENS))

    logprobs = torch.full((sum(TOKENS),), -1.0, dtype=torch.float64)
    summed = {"denominator": weights.denominator, "token_weights": per_token(weights.sequence_weights)}
    loss, _ = clipped_loss(logprobs, logprobs, per_token(advantages), weights=summed)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_clipping_by_hand(advantages: list[float]) -> None:
    """One token each at ratios 1.5, 1.5, 0.5, 4: the bounds are 1.28 for A > 0, 0.8 and 3 |A| for A < 0."""
    ratios = torch.tensor([1.5, 1.5, 0.5, 4.0], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64) * advantages[1]
    loss, sums = clipped_loss(ratios.log(), torch.zeros(4), signs, weights={"denominator": 4.0})
    assert loss.item() == pytest.approx(A * (-1.28 + 1.5 + 0.8 + 3.0) / 4)
    assert (sums["clipped"], sums["dual_clipped"]) == (2, 1)


def test_order_of_rollouts_changes_no_quota_of_the_papers_mode() -> None:
    config = DownSamplingConfig(down_sample_to_n=4)
    rng = random.Random(1)
    for seed in range(50):
        shuffled = rng.sample(GROUP, len(GROUP))
        result = resample_on_correct([shuffled], config, [str(seed)])[0]
        assert (len(result.kept), num_kept_positive(result)) == (4, 2)
        assert {id(t) for t in result.kept} <= {id(t) for t in GROUP} and len(set(result.indices)) == 4
