"""Advantages of turns and an entropy bonus behind tool responses on real layouts, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.algorithm.batch import TrainSequence, over_turns
from tests.actor import reference
from tests.actor.programs import training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def with_turns(batch: list[TrainSequence]) -> list[TrainSequence]:
    """Each run of generated tokens has an advantage of its own."""
    return [replace(s, advantage=over_turns(s.loss_mask, [0.9 - 0.37 * (i % 6) for i in range(s.length)])) for s in batch]


@pytest.mark.parametrize(
    ("ranks", "model"),
    [
        pytest.param(1, {}, id="single"),
        pytest.param(2, {"context_parallel_size": 2}, id="CP2"),
        pytest.param(2, {}, id="DP2", marks=pytest.mark.ci),
        pytest.param(4, {**SP, "context_parallel_size": 2}, id="TP2, SP, CP2", marks=pytest.mark.ci),
    ],
)
def test_every_layout_equals_transformers(pool: RankPool, models: dict[str, Path], ranks: int, model: dict[str, Any]) -> None:
    batches = [with_turns(sequences(7, seed=51)), with_turns(sequences(7, seed=52))]
    config = settings(model=model, entropy_bonus=0.3, entropy_bonus_tokens=2)
    right = reference.train(reference.load(models["qwen2"]), batches, config[0], config[2])
    for history in pool.run(training.train, ranks, config, models["qwen2"], batches):
        for mine, (loss, norm) in zip(history, right, strict=True):
            assert mine["actor/policy_loss"] == pytest.approx(loss, abs=1e-5)
            assert mine["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_bonus_is_for_turns_as_they_were_generated(pool: RankPool, models: dict[str, Path]) -> None:
    """A rule that leaves tokens out of the loss makes no turns of what is left between them.

    All of a single turn is trained but the token that IcePop leaves out: the bonus stays without effect.
    """
    (one,) = sequences(1, seed=53, low=40, high=40)
    mask = [0] * 10 + [1] * 30
    one = replace(one, loss_mask=mask, rollout_logprobs=[-5.8 * bit for bit in mask])
    one.rollout_logprobs[20] = -30.0
    plain, bonus = (
        pool.run(training.train, 1, settings(icepop=[1e-3, 1e3], **keys), models["qwen2"], [[one]])[0][0]
        for keys in ({}, {"entropy_bonus": 0.3, "entropy_bonus_tokens": 2})
    )
    assert plain["actor/masked_tokens"] == bonus["actor/masked_tokens"] == 1
    assert bonus["actor/policy_loss"] == plain["actor/policy_loss"]
