"""What several packages of tests share and is slow to make."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import pytest_asyncio

from rstar2_megatron.tiny.build import TinyPaths, build_tiny
from tests.tiny.small import SMALL

if TYPE_CHECKING:
    from rstar2_megatron.judge.client.service import JudgeService
    from rstar2_megatron.rollout.engine.client import EngineClient
    from tests.rollout.engine.small import SharedEngine

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


@pytest.fixture(scope="session")
def judge_service() -> Iterator[JudgeService]:
    """One Code Judge with one worker. A call may take a second."""
    from rstar2_megatron.judge.client.service import JudgeService

    with JudgeService(workers=1, time_limit_s=1.0) as service:
        yield service


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(memorised_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedEngine]:
    """One SGLang engine on the memorised model. Tests take `engine`."""
    from tests.rollout.engine.small import shared_engine

    async for engine in shared_engine(memorised_model, tmp_path_factory.mktemp("engine") / "engine.log"):
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared_engine: SharedEngine, memorised_model: Path) -> AsyncIterator[EngineClient]:
    """The shared engine, which lives and has its model's weights. A test may kill it or change its weights."""
    from safetensors.torch import load_file

    from tests.rollout.engine.small import update_weights

    client = shared_engine.client
    version, restarts = client.weight_version, client.restarts
    yield client
    if client.lost or (client.weight_version, client.restarts) != (version, restarts):
        weights = load_file(memorised_model / "model.safetensors")
        await update_weights(client, weights.items(), client.weight_version + 1)
