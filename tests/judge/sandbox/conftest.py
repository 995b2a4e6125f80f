"""What the attacks share: the isolation layers of this machine, and the check that the service is untouched."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.judge.conftest import Run

SURVIVOR = f"survivor-{uuid.uuid4().hex}"  # in the arguments of what must not outlive its call; other test runs have another


@pytest.fixture(scope="module")
def layers(http: httpx.Client) -> set[str]:
    (worker,) = http.get("/status").json()["workers"].values()
    return set(worker["isolation"]["active"])


@pytest.fixture
def service_untouched(run: Run, http: httpx.Client) -> Iterator[None]:
    """After each attack both slots answer, and nothing that an attack started lives on."""
    yield
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(run("print('well')")["stdout"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == ["well\n"] * 4
    assert http.get("/status").json()["num_workers"] == 2
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert SURVIVOR.encode() not in process.read_bytes()
        except OSError:
            continue


def need(layers: set[str], *wanted: str) -> None:
    missing = set(wanted) - layers
    if missing:
        pytest.skip(f"this machine does not give {', '.join(sorted(missing))}")
