"""Redis is lost with its last second: workers and Redis come to agree again, and no cell of a session runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.queue import JobQueue, until_redis_answers
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge.calls import HELD, let_go, until_marked
from tests.judge.waiting import until

pytestmark = pytest.mark.ci


class ForgetfulRedis(RedisServer):
    """Can die, and start again as it was at an earlier moment."""

    def now(self) -> int:
        """A moment: the size of the append-only file. What Redis has answered is in it."""
        return max(path.stat().st_size for path in self._files())

    def die(self, moment: int) -> None:
        """After it, `restart` starts as at `moment`."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        for path in self._files():
            with path.open("r+b") as file:
                file.truncate(moment)

    def _files(self) -> Iterator[Path]:
        assert self.directory is not None
        return self.directory.rglob("*.aof")


@pytest.fixture
def forgetful() -> Iterator[ForgetfulRedis]:
    with ForgetfulRedis() as server:
        yield server  # type: ignore[misc]


@pytest.fixture
def service(forgetful: ForgetfulRedis) -> Iterator[JudgeService]:
    with running_judge(num_workers=2, redis_uri=forgetful.uri, time_limit_s=60.0) as service:
        yield service


async def test_cells_that_redis_forgot_do_not_run_twice(forgetful: ForgetfulRedis, service: JudgeService) -> None:
    """One ends while Redis is away, the other when it is back."""
    names = [uuid.uuid4().hex for _ in range(2)]
    async with JudgeClient(service.url, time_limit_s=60.0) as client:
        for name in names:
            await client.run("x = 0", session=name)
        before = forgetful.now()
        calls, pids = [], []
        for name in names:
            calls.append(asyncio.create_task(client.run(f"{HELD}\nx += 1", session=name)))
            running = await until_marked(service, len(calls))
            pids += [process.pid for process in running if process.pid not in pids]
        forgetful.die(before)
        os.kill(pids[0], signal.SIGUSR1)
        await until_marked(service, 1)
        forgetful.restart()
        assert not any(call.done() for call in calls)
        for result, name in zip(await let_go(service, *calls), names, strict=True):
            assert (result.stdout, result.session) == ("done\n", "kept")
            assert (await client.run("x", session=name)).stdout == "1\n"


async def test_worker_and_redis_come_to_agree_on_sessions(forgetful: ForgetfulRedis, service: JudgeService) -> None:
    """Redis forgot one, remembers one that has ended, and believes that another worker has one."""
    forgotten, ended, taken = (uuid.uuid4().hex for _ in range(3))
    queue = JobQueue(forgetful.uri)
    async with (
        JudgeClient(service.url, time_limit_s=60.0) as client,
        httpx.AsyncClient(base_url=service.url, trust_env=False) as plain,
    ):

        async def status() -> dict[str, Any]:
            return dict((await plain.get("/status")).json())

        await client.run("x = 'ended'", session=ended)
        (information,) = (await status())["workers"].values()
        elsewhere = information | {"slots": 0, "sessions": 0, "session_room": 0}
        await queue.heartbeat("elsewhere", elsewhere, [taken])
        before = forgetful.now()
        await queue.forget_sessions("elsewhere", [taken])
        await queue.retire("elsewhere")
        await queue.reap()
        await client.close_session(ended)
        for name, value in ((forgotten, "forgotten"), (taken, "taken")):
            await client.run(f"x = {value!r}", session=name)

        async def has(count: int) -> bool:
            return bool((await status())["sessions"] == count)

        await until(lambda: has(2), "the worker has told of its sessions")
        told = [taken]
        while told:  # else the worker was first, and told Redis of its own
            forgetful.die(before)
            forgetful.restart()
            told = await until_redis_answers("heartbeat", lambda: queue.heartbeat("elsewhere", elsewhere, [taken]))

        async def one_is_left() -> bool:
            await queue.heartbeat("elsewhere", elsewhere, [taken])
            return await has(1)

        await until(one_is_left, "the session that another worker has ends here")

        async def is_known() -> bool:
            """Whether a call finds the session; one that does not is refused."""
            body = {"type": "python", "solution": "x", "options": {"session": forgotten, "session_must_exist": "true"}}
            return bool((await plain.post("/run", json=body)).json()["stdout"] == "'forgotten'\n")

        await until(is_known, "the worker's session is known again")

        async def is_forgotten() -> bool:
            return not (await plain.delete(f"/session/{ended}")).json()["ended"]

        await until(is_forgotten, "the ended session is forgotten")
        await queue.retire("elsewhere")
        await queue.reap()
        client.expect_session(taken)
        assert (await client.run("x", session=taken)).outcome is Outcome.SESSION_LOST
    await queue.close()
