"""Nobody starves: clients take turns, and a call that uses much CPU steps back."""

from __future__ import annotations

import asyncio

import psutil

from rstar2_megatron.judge.client import JudgeClient
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.service import JudgeService


async def test_a_client_with_one_call_does_not_wait_for_one_with_many(judge: JudgeService) -> None:
    async with (
        JudgeClient(judge.url, client_id="many") as many,
        JudgeClient(judge.url, client_id="one") as one,
    ):
        crowd = [asyncio.create_task(many.run("import time; time.sleep(0.1)")) for _ in range(60)]
        while many.counters["calls"] < 60:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # all of them are queued or run
        assert (await one.run("print('in turn')")).ok
        assert sum(task.done() for task in crowd) < 30
        assert all(result.ok for result in await asyncio.gather(*crowd))


async def test_a_call_that_uses_much_cpu_is_demoted(judge: JudgeService) -> None:
    assert judge.process is not None
    service = psutil.Process(judge.process.pid)
    seen: dict[int, tuple[float, int]] = {}  # process id -> its last CPU seconds and niceness
    async with JudgeClient(judge.url) as client:
        for _ in range(6):  # a loaded machine may give it less than a slice before its time is over
            busy = asyncio.create_task(client.run("while True: pass"))
            while not busy.done():
                for process in service.children(recursive=True):
                    try:
                        seen[process.pid] = (sum(process.cpu_times()[:2]), process.nice())
                    except psutil.Error:
                        continue
                await asyncio.sleep(0.1)
            assert (await busy).outcome is Outcome.TIMEOUT
            demoted = [cpu for cpu, niceness in seen.values() if niceness == 10]
            if demoted:
                break
    assert demoted and min(demoted) > 0.25
    assert all(niceness in (0, 10) for _, niceness in seen.values())
