"""JudgeClient against the real service, against the public server's answers, and through failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rstar2_megatron.judge.client.client import JudgeClient, JudgeRejected, JudgeUnavailable
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.settings.schema import CodeJudgeSettings
from tests.judge.calls import HELD, let_go, until_marked
from tests.judge.waiting import until


@pytest.fixture
async def client(judge: JudgeService) -> AsyncIterator[JudgeClient]:
    async with JudgeClient(judge.url, time_limit_s=1.0) as client:
        yield client


async def test_results_are_typed(client: JudgeClient) -> None:
    programs = ["1 + 1", "1 / 0", "import time; time.sleep(60)", "import sys; sys.exit(3)"]
    results = await asyncio.gather(*(client.run(p) for p in programs))
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.ERROR, Outcome.TIMEOUT, Outcome.ERROR]
    assert results[0].ok and results[0].stdout == "2\n"
    assert results[3].exit_code == 3
    assert results[2].seconds >= 1.0
    assert not any(r.is_infrastructure for r in results)
    counters = client.counters
    assert (counters["calls"], counters["retries"], counters["outcome_timeout"]) == (4, 0, 1)


async def test_counters_are_taken_step_by_step(judge: JudgeService) -> None:
    async with JudgeClient(judge.url) as client:
        await asyncio.gather(*(client.run(program) for program in ("1 + 1", "1 / 0")))
        first = client.take_counters()
        assert (first["calls"], first["outcome_ok"], first["outcome_error"]) == (2, 1, 1)
        await client.run("2")
        second = client.take_counters()
        assert (second["calls"], second["outcome_ok"], second["outcome_error"]) == (1, 1, 0)
        assert set(client.take_counters().values()) == {0}
        assert client.counters["calls"] == 3


async def test_a_call_has_the_memory_that_its_client_gives(judge: JudgeService) -> None:
    program = "len(bytearray(100 << 20))"
    settings = CodeJudgeSettings(time_limit_s=1.0, memory_mb=64)
    async with JudgeClient.of(judge.url, settings) as small, JudgeClient(judge.url, time_limit_s=1.0) as client:
        results = await asyncio.gather(small.run(program), client.run(program))
    assert [result.outcome for result in results] == [Outcome.MEMORY, Outcome.OK]


async def test_stdin_and_expected_output(client: JudgeClient) -> None:
    result = await client.run("print(input()[::-1])", "abc", expected_output="cba")
    assert result.success and result.stdout == "cba\n"


async def test_many_calls_through_few_connections(judge: JudgeService) -> None:
    async with JudgeClient(judge.url, max_concurrency=8) as client:
        results = await asyncio.gather(*(client.run(f"print({i})") for i in range(100)))
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(100)]


def test_public_servers_results_are_understood() -> None:
    plain = {"sub_id": "x", "success": True, "run_success": True, "cost": 0.5, "stdout": "1", "stderr": ""}
    assert JudgeResult.from_wire({**plain, "reason": ""}).outcome is Outcome.OK
    failed = {**plain, "success": False, "run_success": False}
    for reason, outcome in {
        "": Outcome.ERROR,
        "worker_timeout": Outcome.TIMEOUT,
        "queue_timeout": Outcome.QUEUE_TIMEOUT,
        "internal_error": Outcome.INTERNAL_ERROR,
        "invalid_input": Outcome.INVALID_INPUT,
    }.items():
        result = JudgeResult.from_wire({**failed, "reason": reason})
        assert result.outcome is outcome and result.exit_code is None


async def test_nobody_there_is_unavailable_after_the_outage_limit() -> None:
    async with JudgeClient("http://127.0.0.1:9", max_outage_s=1.5) as client:
        with pytest.raises(JudgeUnavailable, match=r"127\.0\.0\.1:9"):
            await client.run("1")
        assert client.counters["failed_connection"] >= 2
        assert client.counters["outages"] == 1


def test_a_url_without_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="give http"):
        JudgeClient("localhost:80")


async def test_calls_travel_together_and_each_comes_back_when_it_is_ready(judge: JudgeService) -> None:
    async with JudgeClient(judge.url, time_limit_s=60.0, batch_size=4, batch_window_s=0.05) as client:
        slow = asyncio.create_task(client.run(HELD))
        quick = [asyncio.create_task(client.run(f"print({i})")) for i in range(3)]
        results = await asyncio.gather(*quick)
        assert [r.stdout for r in results] == ["0\n", "1\n", "2\n"] and not slow.done()
        assert [r.stdout for r in await let_go(judge, slow)] == ["done\n"]


async def test_a_call_waits_for_no_other_while_it_is_alone(judge: JudgeService) -> None:
    async with JudgeClient(judge.url, batch_window_s=1000.0) as client, asyncio.timeout(30):
        for _ in range(2):
            assert (await client.run("1 + 1")).stdout == "2\n"
        results = await asyncio.gather(*(client.run(f"print({i})") for i in range(4)))
    assert [result.stdout for result in results] == ["0\n", "1\n", "2\n", "3\n"]


async def test_a_call_that_is_not_valid_takes_no_other_along(judge: JudgeService) -> None:
    async with JudgeClient(judge.url) as client:
        calls = (client.run("1", kind="fortran"), client.run("1"), client.run("2"))
        refused, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, JudgeRejected)
        assert [r.stdout for r in others if isinstance(r, JudgeResult)] == ["1\n", "2\n"]


async def test_text_that_no_request_can_carry_is_the_programs_error(client: JudgeClient) -> None:
    result = await client.run("print('\ud800')")
    assert result.outcome is Outcome.ERROR and "surrogates not allowed" in result.stderr


async def test_a_server_without_our_routes_gets_each_call_alone() -> None:
    server = Scripted((404, {}), answer("", success=True))
    async with server as url, JudgeClient(url) as client:
        results = await asyncio.gather(client.run("1"), client.run("2"))
        assert all(r.ok for r in results)
        assert (await client.run("3")).ok
    assert [r.get("type") for r in server.requests] == ["batch", "python", "python", "python"]


async def test_a_batch_that_breaks_off_is_sent_again() -> None:
    line = json.dumps({"index": 0, "result": answer("", success=True)[1]})
    server = Scripted((200, line), answer("", success=True))
    async with server as url, JudgeClient(url) as client:
        results = await asyncio.gather(client.run("1"), client.run("2"))
        assert all(r.ok for r in results) and client.counters["retries"] == 1
    first, again = server.requests
    assert again["sub_id"] == first["submissions"][1]["sub_id"]


async def test_a_client_that_leaves_ends_its_calls_at_the_judge(judge: JudgeService) -> None:
    """Those that run and those that wait, of this client and of one that sends a plain request."""
    endless = {"type": "python", "solution": HELD, "options": {"time_limit_s": "60"}}
    async with JudgeClient(judge.url, time_limit_s=60.0) as client, httpx.AsyncClient(trust_env=False, timeout=60) as plain:

        async def queued() -> int:
            return int((await plain.get(f"{judge.url}/status")).json()["queue"])

        async def one_is_queued() -> bool:
            return await queued() == 1

        calls = [asyncio.create_task(client.run(HELD)), asyncio.create_task(plain.post(f"{judge.url}/run", json=endless))]
        await until_marked(judge, 2)
        calls.append(asyncio.create_task(client.run(HELD)))
        await until(one_is_queued, "the third call waits")
        for call in reversed(calls):
            call.cancel()
        await until_marked(judge, 0)
        assert await queued() == 0


class Scripted:
    """A server that gives the answers of a list, then repeats the last; it keeps the requests."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        self.requests.append(json.loads(await reader.readexactly(length)))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        text = body.encode() + b"\n" if isinstance(body, str) else json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n" % status)
        writer.write(b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        await writer.drain()
        writer.close()


def answer(reason: str, *, success: bool = False) -> tuple[int, dict[str, Any]]:
    return 200, {"sub_id": "s", "success": success, "run_success": success, "cost": 0.0, "reason": reason}


async def test_overload_and_server_errors_are_retried_under_one_sub_id() -> None:
    server = Scripted((503, {}), (429, {}), answer("queue_timeout"), answer("", success=True))
    async with server as url, JudgeClient(url) as client:
        assert (await client.run("1")).ok
        assert client.counters["retries"] == 3
    assert len(server.requests) == 4 and len({r["sub_id"] for r in server.requests}) == 1


async def test_endless_overload_is_unavailable_after_its_own_limit() -> None:
    async with Scripted((429, {})) as url, JudgeClient(url, max_outage_s=60, max_overload_s=0.3) as client:
        with pytest.raises(JudgeUnavailable, match="enough workers"):
            await client.run("1")
        assert client.counters["outages"] == 0


async def test_internal_error_is_retried_once_as_a_new_job() -> None:
    server = Scripted(answer("internal_error"))
    async with server as url, JudgeClient(url) as client:
        result = await client.run("1")
    assert result.outcome is Outcome.INTERNAL_ERROR and result.is_infrastructure
    assert len({r["sub_id"] for r in server.requests}) == len(server.requests) == 2


@pytest.mark.parametrize("reason", ["", "worker_timeout", "invalid_input"])
async def test_the_programs_own_failure_is_never_retried(reason: str) -> None:
    server = Scripted(answer(reason))
    async with server as url, JudgeClient(url) as client:
        await client.run("1")
    assert len(server.requests) == 1


async def test_refusal_is_not_retried() -> None:
    server = Scripted((401, {"detail": "token"}))
    async with server as url, JudgeClient(url) as client:
        with pytest.raises(JudgeRejected, match="401"):
            await client.run("1")
    assert len(server.requests) == 1


async def test_a_late_answer_is_no_outage(judge: JudgeService) -> None:
    async with (
        JudgeClient(judge.url, time_limit_s=60.0) as others,
        JudgeClient(judge.url, request_timeout_s=2.0, max_outage_s=0.1) as client,
    ):
        busy = [asyncio.create_task(others.run(HELD)) for _ in range(2)]
        await until_marked(judge, 2)
        late = asyncio.create_task(client.run("1 + 1"))
        await until(lambda: client.counters.get("failed_timeout"), "a request took too long")
        await let_go(judge, *busy)
        assert (await late).ok and client.counters["outages"] == 0


async def test_a_judge_that_answers_nothing_is_away() -> None:
    never = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await never.wait()
        writer.close()  # from Python 3.12 on a server waits for its connections when it closes

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with JudgeClient(url, request_timeout_s=0.2, max_outage_s=0.5) as client:
            with pytest.raises(JudgeUnavailable):
                await client.run("1")
            assert client.counters["outages"] == 1
        never.set()
