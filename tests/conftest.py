"""What several packages of tests share and is slow to make."""

from __future__ import annotations

import os
import time
from pathlib import Path

import hypothesis
import pytest

from rstar2_megatron.tiny.build import TinyPaths, build_tiny
from tests.tiny.small import SMALL

# a shared machine's pauses are no fault of the code; pytest's own time limit remains
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")

_STARTED = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come last, those with `first=True` before the others: RSTAR2_TEST_SECONDS leaves out only them."""

    def rank(item: pytest.Item) -> int:
        long = item.get_closest_marker("long")
        return 0 if long is None else 1 if long.kwargs.get("first") else 2

    items.sort(key=rank)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """RSTAR2_TEST_SECONDS: once so many seconds have passed, no long test begins; CI cuts a run off and keeps no result."""
    limit = float(os.environ.get("RSTAR2_TEST_SECONDS", "inf"))
    if item.get_closest_marker("long") and time.monotonic() - _STARTED > limit:
        pytest.skip(f"RSTAR2_TEST_SECONDS={limit:.0f} have passed")


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
