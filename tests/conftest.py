"""What several packages of tests share and is slow to make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rstar2_megatron.tiny.build import TinyPaths

pytest_plugins = ["tests.tiers"]


@pytest.fixture(scope="session")
def memorised_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that makes real tool calls; read-only."""
    # Here, because these load torch, which most tests do without.
    from tests.rollout.memorised import memorise
    from tests.rollout.tiny import make_model

    directory = make_model(tmp_path_factory.mktemp("memorised"))
    memorise(directory)
    return directory


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    """A small build of the tiny recipe; read-only."""
    from rstar2_megatron.tiny.build import build_tiny
    from tests.tiny.small import SMALL

    return build_tiny(tmp_path_factory.mktemp("tiny"), seed=0, recipe=SMALL, progress=lambda line: None)
