"""Corrections of the difference between engine and actor, against the same written out with transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rstar2_megatron.algorithm.batch import TrainSequence
from tests.actor import reference
from tests.actor.programs import training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings

TEMPERATURE = 0.9
TP2 = {"tensor_model_parallel_size": 2}


def ratios(hf: Any, sequence: TrainSequence) -> np.ndarray:
    """Actor / engine of every token; 1 at token 0."""
    with torch.no_grad():
        actor = reference.log_probs(hf, sequence, TEMPERATURE)
    return np.concatenate([[1.0], (actor - torch.tensor(sequence.rollout_logprobs[1:])).exp().numpy()])


def of_trained(hf: Any, batch: list[TrainSequence]) -> list[np.ndarray]:
    return [ratios(hf, s)[s.loss_mask.astype(bool)] for s in batch]


@pytest.mark.parametrize("rule, ranks", [("icepop", 1), ("mis_sequence", 1), ("mis_geometric", 2)])
def test_the_loss_is_that_of_what_is_left(pool: RankPool, models: dict[str, Path], rule: str, ranks: int) -> None:
    """Token mean over the kept tokens only: what is left out is in no denominator."""
    batch, hf = sequences(6, seed=21), reference.load(models["qwen2"])
    trained = of_trained(hf, batch)
    values = {
        "icepop": np.concatenate(trained),
        "mis_sequence": np.array([np.prod(r) for r in trained]),
        "mis_geometric": np.array([np.exp(np.log(r).mean()) for r in trained]),
    }[rule]
    away = np.sort(np.abs(np.log(values)))
    width = float((away[len(away) // 2 - 1] + away[len(away) // 2]) / 2)  # about half of them stay
    band = (float(np.exp(-width)), float(np.exp(width)))
    config = settings(model=TP2 if ranks == 2 else {}, **{rule: band})
    (metrics,) = pool.run(training.train, ranks, config, models["qwen2"], [batch])[0]

    masked = []
    for s, value in zip(batch, values if rule != "icepop" else batch):
        inside = ratios(hf, s) if rule == "icepop" else np.full(s.length, value)
        masked.append(replace(s, loss_mask=s.loss_mask * ((inside >= band[0]) & (inside <= band[1]))))
    before, after = (sum(s.num_trained_tokens for s in b) for b in (batch, masked))
    assert 0 < after < before
    assert metrics["actor/trained_tokens"] == after and metrics["actor/masked_tokens"] == before - after
    assert metrics["actor/masked_token_fraction"] == pytest.approx(1 - after / before)
    right = float(reference.rl_loss(hf, masked, config[2]).detach())
    assert metrics["actor/policy_loss"] == pytest.approx(right, abs=1e-5 * max(1.0, abs(right)))
    everywhere = np.abs(np.log(np.concatenate(trained)))  # not of what the rule left alone
    assert metrics["actor/logprob_diff_mean"] == pytest.approx(everywhere.mean(), abs=1e-4)
    assert metrics["actor/logprob_diff_max"] == pytest.approx(everywhere.max(), abs=1e-3)
    first = [np.abs(np.log(r[: _first_turn(s)])) for r, s in zip(trained, batch)]
    assert metrics["actor/logprob_diff_turn/1"] == pytest.approx(np.concatenate(first).mean(), abs=1e-4)


def _first_turn(sequence: TrainSequence) -> int:
    start = int(sequence.loss_mask.argmax())
    rest = np.flatnonzero(sequence.loss_mask[start:] == 0)
    return int(rest[0]) if len(rest) else sequence.length - start


def test_decoupled_loss_weighs_by_proximal_over_engine(pool: RankPool, models: dict[str, Path]) -> None:
    """Before the first update the ratio to the proximal policy is 1, so the loss is the weighted mean advantage."""
    batch, hf = sequences(5, seed=22), reference.load(models["qwen2"])
    trained = of_trained(hf, batch)
    cap = float(np.quantile(np.concatenate(trained), 0.8)) + 1.0
    config = settings(recompute_logprobs=True, decoupled_loss=True, decoupled_weight_cap=cap)
    (metrics,) = pool.run(training.train, 1, config, models["qwen2"], [batch])[0]
    kept = [r[r <= cap] for r in trained]
    total = -sum(float(r.sum()) * s.advantage for r, s in zip(kept, batch))
    count = sum(len(r) for r in kept)
    assert metrics["actor/trained_tokens"] == count < sum(len(r) for r in trained)
    assert metrics["actor/policy_loss"] == pytest.approx(total / count, rel=1e-4)


def test_a_batch_of_which_nothing_is_left_is_no_update(pool: RankPool, models: dict[str, Path]) -> None:
    config = settings(mis_sequence=(1.0, 1.0))
    (metrics,) = pool.run(training.train, 1, config, models["qwen2"], [sequences(4, seed=23)])[0]
    assert metrics["actor/skipped_update"] == 1.0 and metrics["actor/trained_tokens"] == 0.0
    assert metrics["actor/masked_token_fraction"] == 1.0
