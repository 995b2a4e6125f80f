"""A model and a tokenizer of the project's format."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.rollout.tiny import make_model


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model; read-only."""
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def tokenizer(model: Path):
    return AutoTokenizer.from_pretrained(model)
