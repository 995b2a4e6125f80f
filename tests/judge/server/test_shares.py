"""What one client may take of the queue, by which name, and what a withdrawn job leaves there."""

from __future__ import annotations

import httpx
import pytest
from fastapi import Request

from rstar2_megatron.judge.queue import JobQueue, QueueFull
from rstar2_megatron.judge.server.app import client_name, create_app
from rstar2_megatron.services.redis_server import RedisServer


async def test_an_owner_takes_half_of_the_queue_under_any_number_of_names(redis: RedisServer) -> None:
    queue = JobQueue(redis.uri, prefix="half:", max_queued=40)
    greedy = [f"greedy~{n}/u{n}" for n in range(20)]
    assert await queue.enqueue("replies", [(key, b"{}") for key in greedy]) == 20
    with pytest.raises(QueueFull):
        await queue.enqueue("replies", [("greedy~new/u20", b"{}")])
    assert await queue.enqueue("replies", [("other~/u21", b"{}")]) == 21
    order = [job.key.split("~")[0] for job in await queue.exchange("worker", [], 3)]
    assert sorted(order[:2]) == ["greedy", "other"]  # it also gets its turn at once
    await queue.close()


async def test_a_job_that_was_withdrawn_and_submitted_again_runs_once(redis: RedisServer) -> None:
    queue = JobQueue(redis.uri, prefix="withdrawn:")
    await queue.enqueue("replies", [("client~/k1", b"{}"), ("client~/k2", b"{}")])
    assert await queue.withdraw(["client~/k1", "client~/k3"]) == [True, False]
    assert await queue.enqueue("replies", [("client~/k1", b"{}")]) == 2
    leased = [job.key for _ in range(2) for job in await queue.exchange("worker", [], 8)]
    assert leased == ["client~/k1", "client~/k2"]
    await queue.cancel(leased)
    assert (await queue.status())["queue"] == 0
    await queue.close()


async def test_the_owner_of_a_call_is_named_by_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "ann:one,two")
    app = create_app("redis://127.0.0.1:9/0")

    @app.get("/who")
    async def who(request: Request) -> str:
        return client_name(request)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://judge") as http:
        for token, expected in {"ann:one": "ann~two_x", "two": "token~two_x", "one": None, "": None}.items():
            headers = {"Authorization": f"Bearer {token}", "X-Client-Id": "two~x"}
            answer = await http.get("/who", headers=headers)
            assert answer.status_code == (200 if expected else 401)
            assert expected is None or answer.json() == expected
