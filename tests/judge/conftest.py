"""One real service for most tests: HTTP, Redis, two slots, short limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from rstar2_megatron.judge.client.service import JudgeService

TIME_LIMIT_S = 3.0
MEMORY_MB = 256
SECRET = "a-secret-of-the-service"

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def judge() -> Iterator[JudgeService]:
    os.environ["SOME_SECRET_TOKEN"] = SECRET
    try:
        with JudgeService(workers=2, time_limit_s=TIME_LIMIT_S, memory_mb=MEMORY_MB) as service:
            yield service
    finally:
        del os.environ["SOME_SECRET_TOKEN"]


@pytest.fixture(scope="session")
def http(judge: JudgeService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=judge.url, timeout=60.0, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def run(http: httpx.Client) -> Run:
    """Run a program and return its result."""

    def call(solution: str, **fields: Any) -> dict[str, Any]:
        response = http.post("/run", json={"type": "python", "solution": solution, **fields})
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    return call
