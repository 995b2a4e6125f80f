"""Requests of any content and pace: each gets a clear answer, and none holds up others."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
import uvicorn

from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.server.connections import BoundedProtocol

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "field",
    [
        '"solution": "1", "sub_id": "\\ud800"',
        '"solution": "1", "input": "\\udfff"',
        '"solution": "1", "options": {"files": {"\\ud800": "x"}}',
        '"solution": "\\ud800"',
    ],
)
def test_a_lone_surrogate_fails_only_its_own_submission(http: httpx.Client, field: str) -> None:
    good, bad = ('{"type": "python", "solution": "1 + 1"', '{"type": "python", ' + field)
    body = '{"sub_id": "\\ud800", "submissions": [' + good + "}, " + bad + "}]}"
    response = http.post("/run/batch", content=body.encode(), headers=JSON)
    assert response.status_code == 200, response.text
    good, bad = response.json()["results"]
    assert good["stdout"] == "2\n"
    assert bad["reason"] == "invalid_input" and "surrogate" in bad["stderr"] + "surrogate" * ("files" in field)


@pytest.mark.parametrize("files", [{"a": "", "a/b": ""}, {"a//b": "", "a/b": ""}, {"./a": "", "a": ""}])
def test_files_that_clash_are_invalid_input(http: httpx.Client, files: dict[str, str]) -> None:
    body = {"type": "python", "solution": "1", "options": {"files": files}}
    result = http.post("/run", json=body).json()
    assert result["reason"] == "invalid_input" and "cannot both be written" in result["stderr"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'"\\ud800"', b"[1]"])
def test_what_is_no_submission_is_422(http: httpx.Client, body: bytes) -> None:
    assert http.post("/run", content=body, headers=JSON).status_code == 422


def test_too_large_a_body_is_413_before_it_is_sent(judge: JudgeService) -> None:
    host, port = judge.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{")
        assert sock.recv(1000).startswith(b"HTTP/1.1 413")


async def test_a_large_batch_does_not_hold_up_others(judge: JudgeService) -> None:
    item = {"type": "python", "solution": "1 # " + "x" * 20_000, "options": {"time_limit_s": "none"}}
    body = json.dumps({"submissions": [item] * 1500}).encode()  # 30 MB, refused one by one
    async with httpx.AsyncClient(base_url=judge.url, trust_env=False, timeout=60) as http:
        large = asyncio.create_task(http.post("/run/batch", content=body, headers=JSON))
        pings = 0
        while not large.done():
            await http.get("/ping")
            pings += 1
        response = await large
    assert {r["reason"] for r in response.json()["results"]} == {"invalid_input"}
    assert pings > 5


async def test_a_connection_that_sends_no_head_is_closed() -> None:
    class Impatient(BoundedProtocol):
        head_s = 0.3

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.6)  # an answer may take longer than a head
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, lifespan="off", log_level="error", http=Impatient, timeout_keep_alive=1)
    server = uvicorn.Server(config)
    server.config.load()
    sock = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
        head = b"GET / HTTP/1.1\r\nHost: x\r\n"
        for sent in (b"", head, head + b"\r\n" + head):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(sent)
            answer = await reader.read()  # until the server closes it
            assert answer.startswith(b"HTTP/1.1 204") if b"\r\n\r\n" in sent else answer == b""
            writer.close()
        server.should_exit = True
        await serving
