"""A watched judge: killed with a call in flight, with its worker, on a port that is taken, and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.client import service as module
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService, JudgeServiceError
from rstar2_megatron.runs.check.subjects.judge import importable
from rstar2_megatron.settings.schema import CodeJudgeSettings
from tests.judge.waiting import until

pytestmark = pytest.mark.ci


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[JudgeService]:
    with running_judge(num_workers=1, time_limit_s=60.0, log_path=tmp_path / "judge.log") as service:
        service.watch()
        yield service
    assert not service.alive()


def kill(service: JudgeService) -> None:
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGKILL)


async def test_a_killed_judge_comes_back_where_it_was_and_its_calls_are_answered(
    watched: JudgeService, caplog: pytest.LogCaptureFixture
) -> None:
    url = watched.url
    async with JudgeClient(url, time_limit_s=60.0) as client:
        assert (await client.run("print(1)")).ok
        call = asyncio.create_task(client.run("import time; time.sleep(2); print('whole')"))
        await asyncio.sleep(0.5)
        kill(watched)
        result = await call
        assert (result.ok, result.stdout) == (True, "whole\n")
        assert client.counters["outages"] == 1

        (worker,) = [p for p in psutil.Process(watched.process.pid).children() if "worker" in p.cmdline()]  # type: ignore[union-attr]
        worker.kill()
        await until(lambda: "the Code Judge: a worker ended with code -9: started again" in caplog.text, "word of the worker")
    assert (watched.url, watched.restarts) == (url, 1)
    assert "the Code Judge ended with code -9 and runs again after" in caplog.text
    watched.check()


async def test_a_judge_that_cannot_be_started_again_is_given_up(watched: JudgeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTARTS_IN_A_ROW", 2)
    address = urlsplit(watched.url)
    kill(watched)
    with contextlib.closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def taken() -> bool:
            with contextlib.suppress(OSError):
                other.bind((address.hostname, address.port))
                other.listen()
                return True
            return False

        await until(taken, "the port")
        await until(lambda: watched.failure is not None, "the end of the restarts")
    with pytest.raises(JudgeServiceError, match=r"started again 2 times in vain: .*code 1\njudge: error: cannot listen on"):
        watched.check()


def test_a_proxy_of_the_environment_is_not_for_the_judge(judge_service: JudgeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters set HTTP_PROXY, and it reaches no address inside them."""
    monkeypatch.setattr(urllib.request, "_opener", None)  # what an earlier test has opened
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    url = urlsplit(judge_service.url)
    assert url.hostname and url.port
    settings = CodeJudgeSettings(host_addr=url.hostname, host_port=url.port, time_limit_s=judge_service.settings.time_limit_s)
    named = JudgeService(settings, Path("unused.log"))
    named.begin()
    assert named.wait_ready() == judge_service.url
    assert importable(judge_service.url, None)


def test_a_named_judge_that_would_cut_the_limits_is_refused(judge_service: JudgeService) -> None:
    url = urlsplit(judge_service.url)
    allowed = judge_service.settings
    settings = CodeJudgeSettings(host_addr=url.hostname, host_port=url.port, time_limit_s=1.0, memory_mb=allowed.memory_mb + 1)
    with pytest.raises(
        JudgeServiceError, match=rf"at most memory_mb={allowed.memory_mb}, tools.codejudge.memory_mb=.* --memory-mb"
    ):
        JudgeService(settings, Path("unused.log")).begin()
    settings = CodeJudgeSettings(host_addr=url.hostname, host_port=url.port, time_limit_s=allowed.time_limit_s + 0.5)
    with pytest.raises(JudgeServiceError, match=r"at most time_limit_s=.* start the judge with --time-limit-s"):
        JudgeService(settings, Path("unused.log")).begin()
