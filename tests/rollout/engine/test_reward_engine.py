"""Scores of SGLang's engine on token ids against transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rstar2_megatron.rollout.engine.protocol import EngineError, EngineLost
from rstar2_megatron.rollout.engine.reward_engine import RewardEngine
from tests.actor.tiny import LLAMA3_ROPE, write_model
from tests.rollout.engine.small import settings_for


def write_reward_model(directory: Path, **kind: Any) -> tuple[Path, Any]:
    """A reward model with a random head, and itself in transformers."""
    policy = write_model(directory / "policy", **kind)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    model.save_pretrained(directory / "reward")
    return directory / "reward", model


def expected(model: Any, sequences: list[np.ndarray]) -> list[float]:
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor(s).long()[None]).logits[0, 0]) for s in sequences]


def branches() -> list[np.ndarray]:
    """Prefixes of different lengths, some with a common beginning."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 320, 30).astype(np.int32)
    return [np.concatenate([shared[:n], rng.integers(1, 320, m).astype(np.int32)]) for n, m in
            ((30, 1), (30, 9), (30, 25), (12, 4), (0, 2), (0, 60))]  # fmt: skip


@pytest.mark.ci
@pytest.mark.timeout(300)
async def test_scores_equal_transformers_and_survive_a_kill(tmp_path: Path) -> None:
    directory, model = write_reward_model(tmp_path, tie=True)
    engine = RewardEngine(settings_for(directory), max_context_tokens=900)
    await engine.start()
    try:
        for _ in range(2):  # the second time from the cache
            found = await engine.score(branches(), timeout_s=120)
            assert found == pytest.approx(expected(model, branches()), abs=1e-4)
        assert await engine.score([], timeout_s=1) == []
        with pytest.raises(EngineError, match=r"3000 tokens\) is longer"):
            await engine.score([np.ones(3000, np.int32)], timeout_s=60)
        psutil.Process(engine.pid).kill()
        with pytest.raises(EngineLost):
            await engine.score(branches(), timeout_s=60)
        await engine.recover()
        assert await engine.score(branches()[:1], timeout_s=120) == pytest.approx(expected(model, branches()[:1]), abs=1e-4)
    finally:
        await engine.close()


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [{"qwen3": True}, {"llama": LLAMA3_ROPE}, {"mistral": True}], ids=str)
async def test_other_families(tmp_path: Path, kind: dict[str, Any]) -> None:
    directory, model = write_reward_model(tmp_path, **kind)
    engine = RewardEngine(settings_for(directory))
    await engine.start()
    try:
        found = await engine.score(branches(), timeout_s=120)
        assert found == pytest.approx(expected(model, branches()), abs=1e-4)
    finally:
        await engine.close()
