"""The service as a whole: it ends without a trace, refuses what it cannot serve, and shares its work between processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from benchmarks.judge.running import running_judge
from rstar2_megatron.judge.__main__ import command_line, main, settle_counts
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService, JudgeServiceError
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.services.process import listen
from rstar2_megatron.settings.schema import CodeJudgeSettings
from tests.judge.calls import HELD, control_group, find, gone, let_go, processes, until_marked
from tests.judge.waiting import until

TOKEN = "sesame"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeService]:
    """Two worker processes with three slots, a token, and a short queue: half of it is one client's."""
    extra = ("--processes", "2", "--sessions", "5", "--max-queued", "6", "--queue-time-limit-s", "1")
    settings = CodeJudgeSettings(num_workers=3, time_limit_s=60.0)
    service = JudgeService(settings, tmp_path_factory.mktemp("judge") / "judge.log", extra_arguments=extra)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JUDGE_TOKEN", TOKEN)
        service.begin()
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


@pytest.mark.parametrize("cores", [1, 24, 192, 448])
@pytest.mark.parametrize("files", [1024, 20_000, resource.RLIM_INFINITY])
def test_the_defaults_hold_on_a_machine_of_any_size(cores: int, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run gives its judge 2 to 16 slots, and nothing else that depends on the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (min(files, 1024), files))
    for given in ((), ("--workers", "2"), ("--workers", "16")):
        arguments = command_line().parse_args(["all", *given])
        settle_counts(arguments)
        assert 1 <= arguments.processes <= arguments.workers
        assert 0 < arguments.sessions <= 32 * cores
        assert files < 0 or 5 * arguments.sessions < files  # descriptors of the sandbox


def test_wrong_options_are_refused_by_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--workers", "0"]) == 2
    assert capsys.readouterr().err.startswith("judge: error: --workers 0: between")


def test_a_service_has_a_redis_of_its_own_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URI", "redis://127.0.0.1:1/0")
    with running_judge(num_workers=1) as service:
        assert service.redis_uri != "redis://127.0.0.1:1/0"


def plain(node: JudgeService) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(base_url=node.url, headers=headers, trust_env=False, timeout=60)


@pytest.mark.ci
async def test_worker_processes_share_a_nodes_slots_and_replace_each_other(node: JudgeService) -> None:
    async with JudgeClient(node.url, time_limit_s=60.0, token=TOKEN) as client, plain(node) as http:
        workers = (await http.get("/status")).json()["workers"].values()
        assert sorted(worker["slots"] for worker in workers) == [1, 2]
        assert sorted(worker["session_room"] for worker in workers) == [2, 3]
        calls = [asyncio.create_task(client.run(HELD)) for _ in range(3)]
        await until_marked(node, 3)
        find(node, "worker").kill()
        assert [result.stdout for result in await let_go(node, *calls)] == ["done\n"] * 3


@pytest.mark.ci
async def test_a_full_queue_and_the_time_in_it(node: JudgeService) -> None:
    item = {"type": "python", "solution": "1"}
    async with JudgeClient(node.url, time_limit_s=60.0, token=TOKEN) as client, plain(node) as http:

        async def has_queued(count: int) -> bool:
            return bool((await http.get("/status")).json()["queue"] == count)

        busy = [asyncio.create_task(client.run(HELD)) for _ in range(3)]
        await until_marked(node, 3)
        waiting = asyncio.create_task(http.post("/run/long-batch", json={"submissions": [item] * 3}))
        await until(lambda: has_queued(3), "three wait")
        refused = await http.post("/run", json=item)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        waiting.cancel()
        await until(lambda: has_queued(0), "they are forgotten")
        results = (await http.post("/run/batch", json={"submissions": [item] * 3})).json()["results"]
        assert [result["reason"] for result in results] == ["queue_timeout"] * 3
        assert [result.stdout for result in await let_go(node, *busy)] == ["done\n"] * 3


@pytest.mark.ci
def test_a_run_with_another_token_is_refused_at_its_start(
    node: JudgeService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = urlsplit(node.url)
    named = JudgeService(CodeJudgeSettings(host_addr=url.hostname, host_port=url.port), tmp_path / "unused.log")
    monkeypatch.setenv("JUDGE_TOKEN", "open")
    with pytest.raises(JudgeServiceError, match="refuses the token; export JUDGE_TOKEN as the judge has it"):
        named.begin()
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    named.begin()


async def test_only_who_has_the_token_may_run_programs(node: JudgeService) -> None:
    async with httpx.AsyncClient(base_url=node.url, trust_env=False, timeout=60) as stranger:
        assert (await stranger.get("/ping")).status_code == 200
        assert (await stranger.get("/status")).status_code == 401
        assert (await stranger.post("/run", json={"type": "python", "solution": "1"})).status_code == 401
    async with JudgeClient(node.url, time_limit_s=60.0, token=TOKEN) as client:
        assert (await client.run("1")).outcome is Outcome.OK


def traces(family: list[psutil.Process]) -> set[Path]:
    """Directories that these processes own, by their locks, and control groups that they made for calls."""
    found = set()
    for process in family:
        with contextlib.suppress(OSError):  # a call's, where it has another uid
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                target = Path(os.readlink(link))
                if target.name == ".owner":
                    found.add(target.parent)
        group = control_group(process, "memory")
        if group != control_group(psutil.Process(), "memory"):
            found |= {group, group.parent}
    return found


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("SIGKILL", marks=pytest.mark.ci)])
async def test_a_service_that_is_ended_leaves_nothing(tmp_path: Path, how: str) -> None:
    """No process, directory or group, and no word of error: neither of a call that ends, nor of the workers."""
    log = tmp_path / "judge.log"
    with running_judge(num_workers=2, log_path=log, time_limit_s=60.0) as service:
        async with JudgeClient(service.url, time_limit_s=60.0) as client:
            call = asyncio.create_task(client.run(HELD))
            await until_marked(service, 1)  # a call is running when the end comes
            family = processes(service)
            left = traces(family)
            assert len(left) >= 2
            call.cancel()
            assert service.process is not None
            service.process.send_signal(signal.Signals[how])
            await until(lambda: all(map(gone, family)), "all processes have ended")
    if how == "SIGTERM":
        assert "ERROR" not in log.read_text()
        assert not [path for path in left if path.exists()]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/ping", trust_env=False)


@pytest.mark.ci
def test_a_service_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom rstar2_megatron.judge.client.service import JudgeService\n"
        "from rstar2_megatron.settings.schema import CodeJudgeSettings\n"
        "s = JudgeService(CodeJudgeSettings(num_workers=1), Path(sys.argv[1]))\n"
        "s.begin()\ns.wait_ready()\nprint(s.process.pid, flush=True)\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "judge.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=os.getcwd()) as parent:
        assert parent.stdout is not None
        family = processes(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert all(map(gone, alive))


def test_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        named = pytest.raises(JudgeServiceError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port")
        with named, running_judge(extra_arguments=("--port", str(port))):
            pass


def test_absent_redis_is_named() -> None:
    named = pytest.raises(JudgeServiceError, match=r"no Redis answers at redis://127\.0\.0\.1:9/0")
    with named, running_judge(extra_arguments=("--redis-uri", "redis://127.0.0.1:9/0")):
        pass


def test_beyond_loopback_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(JudgeServiceError, match="JUDGE_TOKEN"), running_judge(extra_arguments=("--host", "0.0.0.0")):
        pass
