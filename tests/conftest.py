"""What several packages of tests share and is slow to make."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from rstar2_megatron.tiny.build import TinyPaths, build_tiny
from tests.tiny.small import SMALL

# a shared machine's pauses are no fault of the code; pytest's own time limit remains
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")


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
    cache: Path = tmp_path_factory.mktemp("tiny")
    return build_tiny(cache, seed=0, recipe=SMALL, progress=lambda line: None)
