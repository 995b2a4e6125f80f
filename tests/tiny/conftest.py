from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.tiny.build import TinyPaths, build_tiny
from rstar2_megatron.tiny.recipe import CopyCurriculum, TinyRecipe

SMALL = TinyRecipe(
    tokenizer_conversations=600,
    train_problems=180,
    heldout_problems=45,
    conversations=200,
    copy=CopyCurriculum(rows=400),
)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    """A small build of the tiny recipe, read-only."""
    cache: Path = tmp_path_factory.mktemp("tiny")
    return build_tiny(cache, seed=0, recipe=SMALL, progress=lambda line: None)
