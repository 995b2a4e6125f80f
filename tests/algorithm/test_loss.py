"""The loss against a slow reference in plain Python, and its normalisation under any split."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.algorithm.loss import aggregate
from tests.algorithm.tokens import clipped_loss

LOW, HIGH, C = 0.2, 0.28, 3.0


def reference_token_loss(logprob: float, old: float, advantage: float) -> tuple[float, bool, bool]:
    """-(clipped objective) of one token as the paper and the dual clip define it, with what was clipped."""
    ratio = math.exp(logprob - old)
    clipped_ratio = min(max(ratio, 1 - LOW), 1 + HIGH)
    objective = min(ratio * advantage, clipped_ratio * advantage)
    clipped = clipped_ratio * advantage < ratio * advantage
    if advantage < 0 and objective < C * advantage:
        return -C * advantage, clipped, True
    return -objective, clipped, False


token = st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))


@given(st.lists(token, min_size=1, max_size=30))
def test_loss_equals_slow_reference(tokens: list[tuple[float, float, float]]) -> None:
    new, old, advantage = (torch.tensor([t[i] for t in tokens], dtype=torch.float64) for i in range(3))
    loss, sums = clipped_loss(new, old, advantage, weights={"denominator": 7.0})
    expected = [reference_token_loss(*t) for t in tokens]
    assert loss.item() == pytest.approx(sum(e[0] for e in expected) / 7.0, rel=1e-9, abs=1e-12)
    assert sums["tokens"] == len(expected)
    # at the border itself float rounding decides; the counts may differ by those
    assert abs(sums["clipped"].item() - sum(e[1] for e in expected)) <= 1
    assert abs(sums["dual_clipped"].item() - sum(e[2] for e in expected)) <= 1


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient_flows"),
    [
        (1.0, 1.0, True),
        (1.29, 1.0, False),  # clip-higher: 1.28 is the border
        (1.27, 1.0, True),
        (0.5, 1.0, True),  # too small with a positive advantage: pulled up
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (2.9, -1.0, True),
        (3.1, -1.0, False),  # dual clip
    ],
)
def test_gradient_stops_exactly_where_clipped(ratio: float, advantage: float, gradient_flows: bool) -> None:
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, _ = clipped_loss(logprob, torch.zeros(1), torch.tensor([advantage]), weights={"denominator": 1.0})
    loss.backward()
    assert logprob.grad is not None
    assert bool(logprob.grad[0] != 0) is gradient_flows


def test_nothing_trained_gives_zero_with_a_gradient() -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, sums = clipped_loss(empty, torch.zeros(0), torch.zeros(0), weights={"denominator": 5.0})
    loss.backward()
    assert empty.grad is not None
    assert loss.item() == 0 and empty.grad.shape == (0,) and sums["tokens"] == 0


def test_tis_weights_and_entropy_enter_the_loss_but_not_the_reported_loss() -> None:
    weights = {"denominator": 2.0, "tis_weights": torch.tensor([0.5, 2.0])}
    arguments = (torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -2.0]))
    loss, sums = clipped_loss(*arguments, entropy=torch.tensor([1.0, 3.0]), entropy_bonus=0.25, weights=weights)
    assert loss.item() == pytest.approx((-0.5 + 4.0 - 0.25 * 4.0) / 2)
    assert sums["pg_loss"].item() == pytest.approx(1.0) and sums["entropy"].item() == 4.0


def test_an_entropy_bonus_of_some_tokens_keeps_the_denominator() -> None:
    """Three tokens, entropies 1, 3 and 5, the bonus for the second alone: 0.25 * 3 / 3 comes off the loss."""
    arguments = (torch.zeros(3), torch.zeros(3), torch.tensor([1.0, -2.0, 0.5]))
    entropy, mask = torch.tensor([1.0, 3.0, 5.0], requires_grad=True), torch.tensor([0.0, 1.0, 0.0])
    weights = {"denominator": 3.0, "entropy_mask": mask}
    loss, sums = clipped_loss(*arguments, entropy=entropy, entropy_bonus=0.25, weights=weights)
    assert loss.item() == pytest.approx((-1.0 + 2.0 - 0.5 - 0.25 * 3.0) / 3)
    (gradient,) = torch.autograd.grad(loss, entropy)
    assert gradient.tolist() == pytest.approx([0.0, -0.25 / 3, 0.0])
    assert sums["entropy"].item() == 9.0, "the metric is that of all tokens"
    everywhere = [
        clipped_loss(*arguments, entropy=entropy, entropy_bonus=0.25, weights={"denominator": 3.0, "entropy_mask": one})[0]
        for one in (None, torch.ones(3))
    ]
    assert everywhere[0].item() == everywhere[1].item()


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=8)


@given(lengths, st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]), st.randoms(use_true_random=False))
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(counts, kind, rng) -> None:
    """Token-mean is global: neither micro-batches, ranks nor order change the gradient."""
    generator = torch.Generator().manual_seed(rng.randint(0, 2**31))
    sequences = [torch.randn(3, n, generator=generator, dtype=torch.float64) for n in counts]
    plan = aggregate(kind, counts)

    def total(order: list[int], splits: list[list[int]]) -> tuple[float, dict[int, Any]]:
        leaves = {i: sequences[i][0].clone().requires_grad_() for i in order}
        loss = torch.zeros((), dtype=torch.float64)
        for part in splits:
            if not part:
                continue
            weights = torch.cat([torch.full((counts[i],), plan.sequence_weights[i], dtype=torch.float64) for i in part])
            part_loss, _ = clipped_loss(
                torch.cat([leaves[i] for i in part]),
                torch.cat([sequences[i][1] for i in part]),
                torch.cat([sequences[i][2] for i in part]),
                weights={"denominator": plan.denominator, "token_weights": weights},
            )
            loss = loss + part_loss
        loss.backward()
        return loss.item(), {i: leaf.grad for i, leaf in leaves.items()}

    order = list(range(len(counts)))
    whole, whole_gradient = total(order, [order])
    rng.shuffle(order)
    cut = rng.randint(0, len(order))
    split, split_gradient = total(order, [order[:cut], order[cut:]])
    assert split == pytest.approx(whole, rel=1e-9, abs=1e-12)
    for i in order:
        assert torch.allclose(split_gradient[i], whole_gradient[i], rtol=1e-9, atol=1e-12)


def mean_loss(losses: list[list[float]], kind: str, **extra) -> float:
    plan = aggregate(kind, [len(x) for x in losses], **extra)
    return sum(w * sum(x) for w, x in zip(plan.sequence_weights, losses)) / plan.denominator


def test_aggregations_by_hand() -> None:
    losses = [[1.0, 2.0, 3.0], [10.0], []]
    assert mean_loss(losses, "token-mean") == pytest.approx(16 / 4)
    assert mean_loss(losses, "seq-mean-token-mean") == pytest.approx((2 + 10) / 2)
    assert mean_loss(losses, "seq-mean-token-sum") == pytest.approx((6 + 10) / 2)
    # RLinf: token mean in each micro-batch, micro-batches weigh the same
    assert mean_loss(losses[:2], "released-rlinf", microbatch_of=[0, 1]) == pytest.approx((2 + 10) / 2)
    assert mean_loss(losses[:2], "released-rlinf", microbatch_of=[0, 0]) == pytest.approx(16 / 4)
    # a rank with nothing in its micro-batch still counts there
    assert mean_loss(losses[:2], "released-rlinf", microbatch_of=[0, 1], num_microbatches=4) == pytest.approx(12 / 4)
    # verl's recipe: token mean x rows / full mini-batch, so half of the groups rejected halves the gradient
    assert mean_loss(losses[:2], "released-verl", microbatch_of=[0, 0], mini_batch_rows=4) == pytest.approx(16 / 4 * 2 / 4)
