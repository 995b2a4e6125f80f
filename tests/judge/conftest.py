"""Real services that tests share: one with two slots, one with many slots and few permits, one inside this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.services.redis_server import RedisServer
from rstar2_megatron.settings.schema import CodeJudgeSettings
from tests.judge.in_process import Judge
from tests.judge.in_process import judge as in_process

MEMORY_MB = 256
SECRET = "a-secret-of-the-service"

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeService]:
    """HTTP, Redis, two slots."""
    settings = CodeJudgeSettings(num_workers=2, time_limit_s=60.0, memory_mb=MEMORY_MB)
    service = JudgeService(settings, tmp_path_factory.mktemp("judge") / "judge.log")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SOME_SECRET_TOKEN", SECRET)
        service.begin()
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="session")
def http(judge: JudgeService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=judge.url, timeout=60.0, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def run(http: httpx.Client) -> Run:
    """Run a program and return its result; as clients do, again when the machine was too busy for it."""

    def call(solution: str, **fields: Any) -> dict[str, Any]:
        for _ in range(10):
            response = http.post("/run", json={"type": "python", "solution": solution, **fields})
            assert response.status_code == 200, response.text
            result: dict[str, Any] = response.json()
            if result["reason"] != "queue_timeout":
                break
        return result

    return call


@pytest.fixture(scope="session")
def crowded() -> Iterator[JudgeService]:
    """Eight slots a core of two, three of which may compute, and so many sessions that descriptors go beyond 1,023."""
    extra = ("--max-running", "3", "--sessions", "500")
    with running_judge(num_workers=16, time_limit_s=60.0, extra_arguments=extra) as service:
        yield service


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge_in_process(redis: RedisServer) -> AsyncIterator[Judge]:
    async with in_process(redis) as judge:
        yield judge


@pytest_asyncio.fixture(loop_scope="module")
async def there(judge_in_process: Judge) -> AsyncIterator[Judge]:
    """The module's judge inside this process, for tests of `asyncio(loop_scope="module")`; as it was at its start."""
    async with judge_in_process.from_new():
        yield judge_in_process
