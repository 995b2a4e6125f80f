"""What several packages of tests share and is slow to make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from rstar2_megatron.judge.client.service import JudgeService
    from rstar2_megatron.rollout.engine.client import EngineClient
    from rstar2_megatron.tiny.build import TinyPaths
    from tests.rollout.engine.small import SharedEngine

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
    from tests.tiny.small import AGENTLOOP, SMALL

    directory = tmp_path_factory.mktemp("tiny")
    return build_tiny(directory, seed=0, agentloop=AGENTLOOP, recipe=SMALL, progress=lambda line: None)


@pytest.fixture(scope="session")
def judge_service() -> Iterator[JudgeService]:
    """One Code Judge with one worker. A call may take a second."""
    from benchmarks.judge.running import running_judge

    with running_judge(num_workers=1, time_limit_s=1.0) as service:
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
