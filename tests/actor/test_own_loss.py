"""A policy loss of the user's on real layouts: one whose ratio is that of a whole sequence, which CP ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.actor.losses import SUMS
from tests.actor.programs import training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings
from tests.algorithm.own import own
from tests.algorithm.test_own_loss import SEQUENCE_RATIO

BATCHES = [sequences(7, seed=31), sequences(7, seed=32)]
KEYS = ("actor/policy_loss", "actor/grad_norm", "actor/loss/sequence_ratio", "actor/ratio", "actor/approx_kl")


@pytest.mark.parametrize(
    ("ranks", "model"),
    [
        pytest.param(2, {"context_parallel_size": 2}, id="CP2"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, id="PP2", marks=pytest.mark.ci),
        pytest.param(4, {"context_parallel_size": 2}, id="CP2, DP2", marks=pytest.mark.ci),
        pytest.param(4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}, id="TP2, CP2",
                     marks=pytest.mark.ci),
    ],
)  # fmt: skip
def test_a_sequence_level_loss_is_the_same_on_every_layout(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, ranks: int, model: dict[str, Any]
) -> None:
    loss = own(tmp_path, SEQUENCE_RATIO)
    (tmp_path / "own.py").unlink()  # ranks get the text
    expected = pool.run(training.train, 1, settings(policy_loss=loss), models["qwen2"], BATCHES)[0]
    assert "sequence_ratio" not in SUMS
    for rank in pool.run(training.train, ranks, settings(model=model, policy_loss=loss), models["qwen2"], BATCHES):
        for mine, right in zip(rank, expected, strict=True):
            assert mine["actor/clip_fraction"] == 0 and right["actor/loss/sequence_ratio"] > 0
            for key in KEYS:
                assert mine[key] == pytest.approx(right[key], rel=1e-4, abs=1e-5), key


@pytest.mark.ci
@pytest.mark.parametrize("loss", ["gspo", "gspo-token"])
def test_gspo_is_the_same_on_context_and_data_parallel_ranks(pool: RankPool, models: dict[str, Path], loss: str) -> None:
    expected = pool.run(training.train, 1, settings(policy_loss=loss), models["qwen2"], BATCHES)[0]
    clipped = pool.run(training.train, 1, settings(), models["qwen2"], BATCHES)[0]
    assert abs(expected[0]["actor/policy_loss"] - clipped[0]["actor/policy_loss"]) > 1e-4
    layout = settings(model={"context_parallel_size": 2}, policy_loss=loss)
    for rank in pool.run(training.train, 4, layout, models["qwen2"], BATCHES):
        for mine, right in zip(rank, expected, strict=True):
            for key in ("actor/policy_loss", "actor/grad_norm", "actor/clip_fraction"):
                assert mine[key] == pytest.approx(right[key], rel=1e-4, abs=1e-5), key
