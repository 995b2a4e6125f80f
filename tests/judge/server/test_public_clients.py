"""What clients of the public Code Judge send and rely on, and the start lines that its documentation gives.

`golden_exchanges.json` holds the form of each client's request and of the answer; fields of ours may come on top.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from omegaconf import OmegaConf
from rlinf.agents.rstar2.http_code_judge_tool import PythonTool
from rlinf.data.tool_call.tool_io_struct import ToolChannelRequest

from benchmarks.judge.programs import in_public_template
from benchmarks.judge.running import running_judge
from rstar2_megatron.services.process import free_port, terminate_tree
from rstar2_megatron.services.redis_server import RedisServer

GOLDEN = json.loads(Path(__file__).with_name("golden_exchanges.json").read_text())
MEASURED = "<seconds>"  # stands for any time
CHOSEN = "<id>"  # stands for any id of the server's
ANY = "<text>"


def matches(expected: Any, given: Any) -> bool:
    if expected == MEASURED:
        return isinstance(given, float) and given >= 0
    if expected == CHOSEN:
        return isinstance(given, str) and len(given) >= 8
    if expected == ANY:
        return isinstance(given, str) and given != ""
    if isinstance(expected, dict):
        return isinstance(given, dict) and all(matches(v, given.get(k)) for k, v in expected.items())
    if isinstance(expected, list):
        return len(expected) == len(given) and all(map(matches, expected, given))
    return type(expected) is type(given) and bool(expected == given)


@pytest.mark.parametrize("exchange", GOLDEN, ids=[exchange["name"] for exchange in GOLDEN])
def test_golden_exchange(http: httpx.Client, exchange: dict[str, Any]) -> None:
    body = json.dumps(exchange["request"]).encode()
    headers = {"content-type": "application/json", **exchange.get("headers", {})}
    response = http.request(exchange["method"], exchange["route"], content=body, headers=headers)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    assert matches(exchange["response"], response.json()), response.text


def test_programs_in_the_public_clients_template_do_what_they_do_in_plain_python(http: httpx.Client) -> None:
    cells = [
        ["x = 6\nx * 7"],
        ["import math\nprint(math.factorial(int(input())))"],
        ["x = 6\nprint(x)\nx", "x * 7"],  # the first is history
        ["x = 1\n1 / 0"],
        ["def f(:"],
    ]
    programs = [in_public_template(*codes) for codes in cells]
    items = [{"type": "python", "solution": program, "input": "12"} for program in programs]
    results = http.post("/run/long-batch", json={"type": "batch", "submissions": items}).json()["results"]
    for program, result in zip(programs, results, strict=True):
        plain = subprocess.run([sys.executable, "-c", program], input="12", capture_output=True, text=True)
        assert (result["stdout"], result["stderr"]) == (plain.stdout, plain.stderr)
        assert result["run_success"] == result["success"] == (plain.returncode == 0)


async def test_rlinfs_own_tool_works_unchanged() -> None:
    """A service of its own, with a short limit: the tool cannot ask for one."""
    with running_judge(num_workers=1, time_limit_s=1.0) as judge:
        host, _, port = judge.url.removeprefix("http://").rpartition(":")
        tool = PythonTool(OmegaConf.create({"tools": {"codejudge": {"host_addr": host, "host_port": int(port)}}}))
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:

            async def send(url: str, data: dict[str, Any]) -> Any:
                return (await client.post(url, json=data)).json()

            for code, told in (
                ("x = int(input())\nx * 7", "Tool call success\nstdout: 42\n\nexecution time: "),
                ("import sympy\nsympy.factorint(12)", "Tool call success\nstdout: {2: 2, 3: 1}\n\nexecution time: "),
                ("1 / 0", "Tool call failure\nreason: \nstderr: ZeroDivisionError at line 1: division by zero\n"),
                ("while True: pass", "Tool call failure\nreason: worker_timeout\n"),
            ):
                request = ToolChannelRequest("session", "execute", tool.name, {"code": code, "input": "6"})
                answer = await tool.execute(request, send)
                assert answer.result.startswith(told), answer.result
                assert answer.success == told.startswith("Tool call success")


@pytest.mark.ci
def test_documented_start_lines() -> None:
    """`uvicorn ...app:app` and worker processes of their own, configured by the public server's variables."""
    port = free_port()
    with RedisServer() as redis:
        environment = {
            **os.environ,
            "REDIS_URI": redis.uri,
            "MAX_EXECUTION_TIME": "1",
            "MAX_STDOUT_ERROR_LENGTH": "40",
            "MAX_QUEUE_WORK_LIFE_TIME": "30",
            "RUN_WORKERS": "0",
            "MAX_WORKERS": "1",
        }
        lines = [
            ["uvicorn", "rstar2_megatron.judge.app:app", "--workers", "2", "--host", "127.0.0.1", "--port", str(port)],
            ["rstar2_megatron.judge", "worker"],
        ]
        started = [subprocess.Popen([sys.executable, "-m", *line], env=environment) for line in lines]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as http:
                deadline = time.monotonic() + 120
                while True:
                    try:
                        if http.get("/ready").status_code == 200:
                            break
                    except httpx.TransportError:
                        pass
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                assert http.get("/status").json()["num_workers"] == 1
                run = {"type": "python", "solution": "import time; time.sleep(60)"}
                result = http.post("/run", json=run).json()
                assert result["reason"] == "worker_timeout" and result["cost"] >= 1.0
                assert http.get("/status").json()["limits"]["time_limit_s"] == 1.0
                result = http.post("/run", json={"type": "python", "solution": "print('x' * 500)"}).json()
                assert len(result["stdout"]) == 40
        finally:
            for process in started:
                terminate_tree(process.pid)
                process.wait()
