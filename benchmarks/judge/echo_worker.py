"""A judge worker that answers at once without running programs, to measure the cost of HTTP and Redis.

    python -m benchmarks.judge.echo_worker REDIS_URI

For `benchmarks.judge.calls --cases overhead` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

import orjson
import uvloop

from rstar2_megatron.judge.commands import on_signals
from rstar2_megatron.judge.limits import default_permits
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.judge.queue import JobQueue
from rstar2_megatron.judge.worker.slots import Slot, SlotPool
from rstar2_megatron.judge.worker.worker import Worker
from rstar2_megatron.services.parent_death import die_with_parent


class EchoSlot(Slot):
    """Answers as if a program had printed 1."""

    def __init__(self, index: int) -> None:
        self.index = index

    async def run(self, job: bytes, deadline_s: float, on_demotion: Callable[[], None] = lambda: None) -> bytes:
        sub_id = orjson.loads(job)["sub_id"]
        return orjson.dumps(make_result(sub_id, Outcome.OK, stdout="1\n", exit_code=0, worker="echo"))


class EchoPool(SlotPool):
    alive = True

    async def start(self, timeout_s: float = 60.0) -> None:
        self.description = {"isolation": {"level": "minimal", "active": [], "missing": {}, "notes": {}}}
        for index in range(self.count):
            self.free.put(EchoSlot(index))

    async def stop(self) -> None:
        pass


async def main(uri: str) -> None:
    stop = asyncio.Event()
    on_signals(stop.set)
    die_with_parent()
    worker = Worker(JobQueue(uri), slots=32, permits=default_permits(), require_isolation="minimal")
    worker.pool = EchoPool(32)
    await worker.start()
    running = asyncio.create_task(worker.run())
    await stop.wait()
    await worker.stop()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(sys.argv[1]))
