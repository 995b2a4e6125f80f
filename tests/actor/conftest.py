"""Rank processes and tiny models, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actor.ranks import RankPool
from tests.actor.tiny import LLAMA3_ROPE, write_model


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face directories by name."""
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen2": write_model(root / "qwen2"),
        "qwen2-tied": write_model(root / "qwen2-tied", tie=True),
        "qwen3": write_model(root / "qwen3", qwen3=True),
        "llama": write_model(root / "llama", llama=LLAMA3_ROPE),
        "llama-tied": write_model(root / "llama-tied", tie=True, llama={"rope_type": "default", "rope_theta": 1e4}),
        "mistral": write_model(root / "mistral", mistral=True),
        "moe": write_model(root / "moe", experts={}),
        "moe-tied": write_model(root / "moe-tied", tie=True, experts={"norm_topk_prob": False}),
    }
