"""What happens when a part dies: nothing is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from redis import Redis

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService, JudgeServiceError
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.queue import PREFIX, JobQueue
from rstar2_megatron.services.process import listen
from rstar2_megatron.services.redis_server import RedisServer
from tests.judge import in_process
from tests.judge.waiting import until
from tests.processes import command_line


@pytest.fixture(scope="module")
def service() -> Iterator[JudgeService]:
    with JudgeService(workers=2, time_limit_s=5.0) as service:
        yield service


def processes(service: JudgeService) -> list[psutil.Process]:
    assert service.process is not None
    main = psutil.Process(service.process.pid)
    return [main, *main.children(recursive=True)]


def find(service: JudgeService, argument: str) -> psutil.Process:
    """The first process, from the root down, with an argument that ends so."""
    return next(p for p in processes(service) if any(a.endswith(argument) for a in command_line(p)))


def gone(process: psutil.Process) -> bool:
    return not process.is_running()


def pid_namespace(process: psutil.Process) -> str:
    return os.readlink(f"/proc/{process.pid}/ns/pid")


def busy_slots(service: JudgeService) -> list[psutil.Process]:
    """Slot processes that execute a call: the call has a PID namespace of its own."""
    slots = []
    for process in processes(service):
        try:
            slot, above = process.parents()[:2]
            if "zygote" in " ".join(command_line(above)) and pid_namespace(process) != pid_namespace(slot):
                slots.append(slot)
        except (psutil.Error, OSError, ValueError):
            continue
    return slots


async def running(service: JudgeService, count: int, headers: dict[str, str] | None = None) -> None:
    """Until so many calls are being executed."""

    def there() -> bool:
        answer = httpx.get(f"{service.url}/status", headers=headers, trust_env=False)
        workers = answer.json()["workers"].values()
        return sum(w["running"] for w in workers) >= count

    await until(there, f"{count} calls running")


SLOW = "import time; time.sleep(2.5); print('done')"


async def test_worker_killed_in_mid_call_the_job_is_done_again(service: JudgeService) -> None:
    async with JudgeClient(service.url, time_limit_s=5.0) as client:
        calls = [asyncio.create_task(client.run(SLOW)) for _ in range(3)]
        await running(service, 2)
        worker = find(service, "worker")
        sandbox = worker.children(recursive=True)
        worker.send_signal(signal.SIGKILL)
        results = await asyncio.gather(*calls)
        assert [r.stdout for r in results] == ["done\n"] * 3
        assert client.counters["retries"] == 0
    await until(lambda: not any(p.is_running() for p in sandbox), "the dead worker's sandbox has ended")


@pytest.mark.parametrize("library", ["", "import numpy; "])
async def test_slot_killed_in_mid_call_the_job_is_done_again(service: JudgeService, library: str) -> None:
    async with JudgeClient(service.url, time_limit_s=5.0) as client:
        call = asyncio.create_task(client.run(library + SLOW))
        await running(service, 1)
        await until(lambda: busy_slots(service), "the call runs")
        busy_slots(service)[0].send_signal(signal.SIGKILL)
        result = await call
        assert result.stdout == "done\n"
        assert (await client.run("1")).ok


async def test_redis_killed_and_started_again_no_job_is_lost(service: JudgeService) -> None:
    async with JudgeClient(service.url, time_limit_s=5.0) as client:
        calls = [asyncio.create_task(client.run(SLOW.replace("2.5", "1"))) for _ in range(6)]
        await running(service, 2)
        next(p for p in processes(service) if p.name() == "redis-server").send_signal(signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert [r.stdout for r in results] == ["done\n"] * 6


async def test_sessions_live_through_a_restart_of_redis(service: JudgeService) -> None:
    async with JudgeClient(service.url, time_limit_s=5.0) as client:
        await client.run("x = 41", session="through-a-restart")
        await asyncio.sleep(1.5)  # what is older than a second is in the append-only file
        next(p for p in processes(service) if p.name() == "redis-server").send_signal(signal.SIGKILL)
        result = await asyncio.wait_for(client.run("x + 1", session="through-a-restart"), 30)
        assert (result.stdout, result.session) == ("42\n", "kept")
        await client.close_session("through-a-restart")


async def test_a_cell_that_redis_forgot_is_not_run_twice() -> None:
    """It may forget its last second: that a job is leased, or done."""
    with RedisServer() as redis, JudgeService(workers=2, redis_uri=redis.uri) as service:
        store = Redis.from_url(redis.uri)
        async with JudgeClient(service.url) as client:
            await client.run("x = 0", session="forgotten")
            cell = "import time; time.sleep(0.5); x += 1; print(x)"
            call = asyncio.create_task(client.run(cell, session="forgotten"))
            await until(lambda: store.hlen(f"{PREFIX}owner") == 1, "the cell is leased")
            store.delete(*(f"{PREFIX}{name}" for name in ("jobs", "owner", "tries", "waiters")))
            await asyncio.sleep(1.0)  # the worker's answer is to a job that nobody knows
            assert not call.done()
            store.client_kill_filter(_type="normal", skipme=True)  # as a restart does to its clients
            first = await asyncio.wait_for(call, 30)
            then = await client.run("x", session="forgotten")
    assert (first.stdout, first.session) == ("1\n", "kept")
    assert then.stdout == "1\n"


async def test_worker_and_redis_come_to_agree_on_sessions() -> None:
    """Redis forgot one, remembers two that have ended, and gave one to another worker; none on its way is taken away."""
    with RedisServer() as redis, JudgeService(workers=2, redis_uri=redis.uri) as service:
        store = Redis.from_url(redis.uri, decode_responses=True)
        queue = JobQueue(redis.uri)
        (worker,) = store.smembers(f"{PREFIX}workers")
        sessions, held = f"{PREFIX}sessions", f"{PREFIX}held:{worker}"

        def is_agreed() -> bool:
            return store.smembers(held) == {"forgotten", "kept"} and "ended 1" not in store.hkeys(sessions)

        async with JudgeClient(service.url) as client:
            for name in ("forgotten", "kept", "taken"):
                await client.run(f"x = {name!r}", session=name)
            assert await queue.heartbeat(worker, {}, []) == []  # as before the worker hears that it was given three
            assert (await client.run("x", session="kept")).session == "kept"
            store.hdel(sessions, "forgotten")
            store.srem(held, "forgotten", "taken")
            store.set(f"{PREFIX}alive:other", "{}", ex=60)
            store.hset(sessions, "taken", "other")
            for name in ("ended 1", "ended 2", "ended 3"):
                store.hset(sessions, name, worker)
                store.sadd(held, name)
            await until(is_agreed, "the same sessions")
            assert store.hget(sessions, "taken") == "other"
            for name in ("forgotten", "kept"):
                assert (await client.run("x", session=name)).stdout == f"{name!r}\n"
            status = httpx.get(f"{service.url}/status", trust_env=False).json()
        await queue.close()
    assert status["workers"][worker]["sessions"] == 2  # the one that is open elsewhere has ended here


async def test_one_missing_and_one_too_many_do_not_hide_each_other() -> None:
    with RedisServer() as redis:
        async with in_process.judge(redis, permits=2, sessions=4) as judge:
            store, prefix = judge.queue.redis, judge.queue.prefix
            held = f"{prefix}held:{judge.worker.name}"
            await judge.results(await judge.submit("x = 1", "x = 2", sessions=["kept", "forgotten"]))
            await store.hdel(f"{prefix}sessions", "forgotten")
            await store.srem(held, "forgotten")
            await store.hset(f"{prefix}sessions", "ended", judge.worker.name)
            await store.sadd(held, "ended")
            for _ in range(2):
                await judge.worker._heartbeat()
            assert await store.smembers(held) == {b"kept", b"forgotten"}
            assert set(await store.hkeys(f"{prefix}sessions")) == {b"kept", b"forgotten"}
            (result,) = await judge.results(await judge.submit("x", sessions=["forgotten"]))
            assert (result["stdout"], result["session"]) == ("2\n", "kept")


async def test_client_that_leaves_frees_its_slot(service: JudgeService) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        body = {"type": "python", "solution": "import time; time.sleep(60)"}
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                await http.post(f"{service.url}/run", json=body, timeout=0.5)
    started = time.monotonic()
    async with JudgeClient(service.url) as client:
        assert (await client.run("1")).ok
    assert time.monotonic() - started < 4.0  # the abandoned calls would have held both slots for 5 s


async def test_server_killed_and_started_again_while_clients_wait() -> None:
    with RedisServer() as redis, JudgeService(workers=2, redis_uri=redis.uri) as first:
        port = int(first.url.rsplit(":", 1)[1])
        async with JudgeClient(first.url, request_timeout_s=20.0) as client:
            calls = [asyncio.create_task(client.run(SLOW.replace("2.5", "1.5"))) for _ in range(4)]
            await running(first, 2)
            family = processes(first)
            assert first.process is not None
            first.process.kill()
            await until(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), "all ended")
            with JudgeService(workers=2, redis_uri=redis.uri, port=port):
                results = await asyncio.wait_for(asyncio.gather(*calls), 60)
            assert [r.stdout for r in results] == ["done\n"] * 4
            assert client.counters["outages"] >= 1 and client.counters["outage_seconds"] > 0


async def test_a_job_that_kills_its_slot_twice_is_an_internal_error(service: JudgeService) -> None:
    others = {slot.pid for slot in busy_slots(service)}  # sessions of the tests before live on

    def ours() -> list[psutil.Process]:
        return [slot for slot in busy_slots(service) if slot.pid not in others]

    async with httpx.AsyncClient(trust_env=False) as http:
        body = {"type": "python", "solution": "import time; time.sleep(4)"}
        call = asyncio.create_task(http.post(f"{service.url}/run", json=body, timeout=60))
        for _ in range(2):
            await until(ours, "the call runs")
            slot = ours()[0]
            slot.send_signal(signal.SIGKILL)
            await until(partial(gone, slot), "the slot has ended")
        result = (await call).json()
        assert (result["reason"], result["outcome"]) == ("internal_error", "internal_error")
        assert "died twice" in result["stderr"]


async def test_full_queue_queue_time_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "sesame")
    headers = {"Authorization": "Bearer sesame"}
    extra = ("--max-queued", "6", "--queue-time-limit-s", "2")  # half of it is one client's
    with JudgeService(workers=1, time_limit_s=9.0, extra_arguments=extra) as service:
        assert httpx.get(f"{service.url}/ping", trust_env=False).status_code == 200
        assert httpx.get(f"{service.url}/status", trust_env=False).status_code == 401
        async with JudgeClient(service.url, token="sesame") as client:
            assert (await client.run("1")).outcome is Outcome.OK
        async with httpx.AsyncClient(base_url=service.url, headers=headers, trust_env=False, timeout=60) as http:
            longer = SLOW.replace("2.5", "7")  # than it takes to see it run and three others wait in vain
            busy = asyncio.create_task(http.post("/run", json={"type": "python", "solution": longer}))
            await running(service, 1, headers)
            item = {"type": "python", "solution": "1"}
            waiting = asyncio.create_task(http.post("/run/batch", json={"submissions": [item] * 3}))
            await until(
                lambda: httpx.get(f"{service.url}/status", headers=headers, trust_env=False).json()["queue"] == 3, "three wait"
            )
            refused = await http.post("/run", json=item)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            results = (await waiting).json()["results"]
            assert [r["reason"] for r in results] == ["queue_timeout"] * 3
            assert (await busy).json()["stdout"] == "done\n"


async def test_worker_processes_share_a_nodes_slots_and_replace_each_other() -> None:
    with JudgeService(workers=3, extra_arguments=("--processes", "2", "--sessions", "5")) as judge:
        async with JudgeClient(judge.url) as client, httpx.AsyncClient(trust_env=False) as plain:

            async def told(name: str) -> list[int]:
                workers = (await plain.get(f"{judge.url}/status")).json()["workers"]
                return sorted(worker[name] for worker in workers.values())

            assert (await told("slots"), await told("session_room")) == ([1, 2], [2, 3])
            calls = [asyncio.create_task(client.run(f"import time; time.sleep(1); {n}")) for n in range(6)]
            await asyncio.sleep(0.5)
            find(judge, "worker").kill()
            assert [(await call).stdout for call in calls] == [f"{n}\n" for n in range(6)]


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    """No process, directory or group, and no word of error: neither of the call that ends, nor of the workers."""
    before, log = set(Path("/tmp").glob("rstar2-*")), tmp_path / "judge.log"
    with JudgeService(workers=2, log_path=log) as service:
        family = processes(service)
        owner = next(p.pid for p in family if "zygote" in " ".join(command_line(p)))
        assert len(family) >= 6
        # a call is running when the stop comes
        with pytest.raises(httpx.ReadTimeout):
            body = {"type": "python", "solution": "import time; time.sleep(60)"}
            httpx.post(f"{service.url}/run", json=body, timeout=0.3, trust_env=False)
    assert "ERROR" not in log.read_text()
    assert not any(p.is_running() and p.status() != "zombie" for p in family)
    assert set(Path("/tmp").glob("rstar2-*")) <= before
    assert not list(Path("/sys/fs/cgroup").glob(f"*/**/rstar2-judge-{owner}"))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/ping", trust_env=False)


def test_parents_death_ends_the_service(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom rstar2_megatron.judge.client.service import JudgeService\n"
        "s = JudgeService(workers=1).start()\nprint(s.process.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=os.getcwd()) as parent:
        assert parent.stdout is not None
        main = psutil.Process(int(parent.stdout.readline()))
        family = [main, *main.children(recursive=True)]
        parent.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [p for p in alive if p.status() != "zombie"]


def test_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(JudgeServiceError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
            JudgeService(port=port).start()


def test_absent_redis_is_named() -> None:
    with pytest.raises(JudgeServiceError, match=r"no Redis answers at redis://127\.0\.0\.1:9/0"):
        JudgeService(redis_uri="redis://127.0.0.1:9/0").start()


def test_beyond_loopback_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(JudgeServiceError, match="JUDGE_TOKEN"):
        JudgeService(host="0.0.0.0").start()


@pytest.mark.skipif(
    subprocess.run(["unshare", "-U", "--map-user=1000", "true"], capture_output=True).returncode != 0,
    reason="no user namespaces here",
)
def test_ordinary_user_gets_user_namespaces_and_is_told_what_is_missing(tmp_path: Path) -> None:
    command = ["unshare", "-U", "--map-user=1000", "--map-group=1000", sys.executable]
    command += ["-m", "rstar2_megatron.judge", "all", "--workers", "1"]
    refused = subprocess.run([*command, "--require-isolation", "full"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "own_uid" in refused.stderr
    port_file = tmp_path / "port.json"
    with subprocess.Popen([*command, "--port-file", str(port_file)]) as process:
        try:
            deadline = time.monotonic() + 60
            while not port_file.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            url = httpx.Response(200, text=port_file.read_text()).json()["url"]
            status = httpx.get(f"{url}/status", trust_env=False).json()
            assert status["isolation"] == "partial"
            (worker,) = status["workers"].values()
            assert "own_uid" in worker["isolation"]["missing"]
            assert {"pid_namespace", "private_tmpfs", "seccomp"} <= set(worker["isolation"]["active"])
            body = {"type": "python", "solution": "import os; os.getpid(), os.listdir('.')"}
            assert httpx.post(f"{url}/run", json=body, trust_env=False).json()["stdout"] == "(1, [])\n"
        finally:
            process.terminate()
