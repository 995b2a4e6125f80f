"""The preference loss against its definition and torch's gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rstar2_megatron.algorithm.preference import Comparison, Pairs, pair_figures, preference_loss, score_sequence


def comparison(better: int, worse: int, leave_out: tuple[tuple[int, int], ...] = ()) -> Comparison:
    pairs = [(i, better + j) for i in range(better) for j in range(worse) if (i, j) not in leave_out]
    return Comparison(np.arange(5), [np.arange(n + 1) for n in range(better + worse)], pairs)


BATCH = [comparison(2, 2), comparison(1, 4), comparison(2, 2, ((1, 1),)), comparison(1, 1)]


def tensors(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(pairs.better), torch.tensor(pairs.worse), torch.tensor(pairs.weights)


def test_ln_2_without_an_opinion() -> None:
    pairs = Pairs.of(BATCH)
    scores = torch.zeros(int(pairs.sizes.sum()), dtype=torch.float64)
    assert float(preference_loss(scores, *tensors(pairs))) == pytest.approx(math.log(2), abs=1e-12)
    assert float(pair_figures(scores, *tensors(pairs))["pair_accuracy"]) == pytest.approx(0.5)


def test_loss_and_gradient_equal_the_definition() -> None:
    """The mean over comparisons of the mean over pairs of -log sigmoid(difference), written out."""
    pairs = Pairs.of(BATCH)
    torch.manual_seed(1)
    scores = torch.randn(int(pairs.sizes.sum()), dtype=torch.float64, requires_grad=True)
    total, first = torch.zeros((), dtype=torch.float64), 0
    for one in BATCH:
        own = [-torch.sigmoid(scores[first + i] - scores[first + j]).log() for i, j in one.pairs]
        total = total + sum(own) / len(own)
        first += len(one.continuations)
    expected = total / len(BATCH)
    loss = preference_loss(scores, *tensors(pairs))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    (ours,) = torch.autograd.grad(loss, scores)
    (theirs,) = torch.autograd.grad(expected, scores)
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_a_step_moves_pairs_apart() -> None:
    pairs = Pairs.of(BATCH)
    scores = torch.zeros(int(pairs.sizes.sum()), requires_grad=True)
    better, worse, weights = tensors(pairs)
    preference_loss(scores, better, worse, weights.float()).backward()
    assert scores.grad is not None
    figures = pair_figures(-scores.grad, better, worse, weights.float())
    assert float(figures["pair_accuracy"]) == pytest.approx(1.0) and float(figures["pair_margin"]) > 0


def test_prefixes_are_numbered_through() -> None:
    pairs = Pairs.of(BATCH)
    assert pairs.sizes.tolist() == [4, 5, 4, 2]
    assert pairs.ranges == [range(0, 4), range(4, 9), range(9, 13), range(13, 15)]
    assert list(zip(pairs.better.tolist(), pairs.worse.tolist()))[4:8] == [(4, 5), (4, 6), (4, 7), (4, 8)]
    assert pairs.weights.sum() == pytest.approx(1.0)
    assert pairs.weights[-1] == pytest.approx(1 / 4) and pairs.weights[0] == pytest.approx(1 / 16)


def test_sequences_join_the_shared_tokens() -> None:
    one = comparison(1, 1)
    assert one.lengths == [6, 7]
    assert [s.input_ids.tolist() for s in one.sequences()] == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 0, 1]]
    assert score_sequence(np.array([3, 4])).num_trained_tokens == 0


def test_large_margins_stay_finite() -> None:
    scores = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = preference_loss(scores, torch.tensor([0]), torch.tensor([1]), torch.ones(1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2e4) and scores.grad is not None
    assert scores.grad.tolist() == [-1.0, 1.0]
