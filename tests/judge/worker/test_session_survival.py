"""Sessions that are rebuilt after their worker's death, and sessions that make room for another client."""

from __future__ import annotations

import uuid

import psutil
import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.limits import Submission
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.worker import sessions
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.in_process import Judge
from tests.judge.in_process import judge as in_process
from tests.processes import command_line


async def test_a_session_is_rebuilt_after_its_workers_death() -> None:
    steady, random, closed = (uuid.uuid4().hex for _ in range(3))
    with JudgeService(workers=2, time_limit_s=5.0) as service:
        assert service.process is not None
        async with JudgeClient(service.url, time_limit_s=3.0) as client:
            given = {"given": "4"}
            await client.run("x = int(open('given').read())", session=steady, replay=True, files=given)
            failed = await client.run("x += int(input())\nx\n1 / 0", "30", session=steady, replay=True)
            assert failed.outcome is Outcome.ERROR
            await client.run("x = 5; import os; print(os.urandom(8))", session=random, replay=True)
            await client.run("x = 5", session=closed, replay=True)
            await client.close_session(closed)
            family = psutil.Process(service.process.pid).children(recursive=True)
            next(p for p in family if "worker" in command_line(p)).kill()
            for expected in ("34\n", "35\n"):
                after = await client.run("x += 1\nx - 1", session=steady, replay=True)
                assert (after.stdout, after.session) == (expected, "kept"), after
            lost = await client.run("x", session=random, replay=True)
            assert lost.outcome is Outcome.SESSION_LOST and "another output" in lost.stderr
            for session in (random, closed):
                fresh = await client.run("'x' in globals()", session=session, replay=True)
                assert (fresh.stdout, fresh.session) == ("False\n", "new")


async def test_idle_sessions_make_room_for_a_client_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "EVICTABLE_AFTER_S", 0.0)

    async def cell(judge: Judge, client: str, session: str, **options: str) -> dict[str, object]:
        submission = Submission("python", "1", options={"session": session, **options})
        (result,) = await judge.results(await judge.broker.submit([submission], client))
        return result

    with RedisServer() as redis:
        async with in_process(redis, permits=2, sessions=4) as judge:
            for number in range(4):
                assert (await cell(judge, f"hog~{number}", f"hog{number}"))["outcome"] == "ok"
            await cell(judge, "hog~0", "hog0")  # used last
            for number in range(2):
                assert (await cell(judge, "other~", f"other{number}"))["outcome"] == "ok"
            kept = [await cell(judge, "hog~", f"hog{n}", session_must_exist="true") for n in range(4)]
            assert [result["outcome"] for result in kept] == ["ok", "session_lost", "session_lost", "ok"]
            waiting = Submission("python", "1", options={"session": "other2"})
            judge.broker.queue_time_limit_s = 3.0  # an equal share is not taken away
            (late,) = await judge.results(await judge.broker.submit([waiting], "other~"))
            assert late["outcome"] == "queue_timeout"
