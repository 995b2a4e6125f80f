"""Sends calls that are made within a few milliseconds in one request; each gets its result as soon as it is ready.

A call that is made while no other is under way is sent at once.

Uses our server's `/run/stream`. The public server answers a batch as a whole, so a quick call would wait for the
slowest one: to a server without that route every call is sent alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

Submitted = tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]
_NO_SUCH_ROUTE = (404, 405)
_NOT_VALID = 422


class BrokenBatch(Exception):
    """The request ended before this call's result came."""


class RefusedBatch(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, headers: Any, detail: str) -> None:
        super().__init__(f"HTTP {status} {detail}")
        self.status, self.headers, self.detail = status, headers, detail


class Batches:
    """Collects submissions for `window_s` while others are under way, at most `size` of them, and sends them together."""

    def __init__(self, open_session: Callable[[], aiohttp.ClientSession], url: str, size: int, window_s: float) -> None:
        self._open_session = open_session
        self._url = url
        self._size = size
        self._window_s = window_s
        self._waiting: list[Submitted] = []
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self.supported = size > 1  # until the server answers that it has no such route

    async def run(self, submission: dict[str, Any]) -> dict[str, Any]:
        """The SubmissionResult. Raises BrokenBatch, RefusedBatch, aiohttp.ClientError, TimeoutError."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._waiting.append((submission, result))
        self._under_way += 1
        if len(self._waiting) >= self._size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._window_s if self._under_way > 1 else 0.0, self._flush)
        try:
            return await result
        finally:
            self._under_way -= 1

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = [w for w in self._waiting if not w[1].done()], []
        if not batch:
            return
        task = asyncio.create_task(self._send(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        def end_if_nobody_waits(result: asyncio.Future[dict[str, Any]]) -> None:
            if result.cancelled() and all(other.done() for _, other in batch):
                task.cancel()  # closes the connection, so that the server ends the running calls

        for _, result in batch:
            result.add_done_callback(end_if_nobody_waits)

    async def _send(self, batch: list[Submitted]) -> None:
        error: Exception = BrokenBatch("the answer ended early")
        try:
            if len(batch) == 1:
                await self._send_alone(*batch[0])
            elif not (self.supported and await self._send_together(batch)):
                await asyncio.gather(*(self._send([waiting]) for waiting in batch))
        except Exception as raised:
            error = raised
        finally:
            for _, result in batch:
                if not result.done():
                    result.set_exception(error)

    async def _send_alone(self, submission: dict[str, Any], result: asyncio.Future[dict[str, Any]]) -> None:
        async with self._open_session().post(f"{self._url}/run", json=submission) as response:
            await _check(response)
            fields = await response.json()
        if not result.done():
            result.set_result(fields)

    async def _send_together(self, batch: list[Submitted]) -> bool:
        """False when each call has to be sent alone."""
        body = {"type": "batch", "submissions": [submission for submission, _ in batch]}
        async with self._open_session().post(f"{self._url}/run/stream", json=body) as response:
            if response.status == _NOT_VALID:  # an invalid submission must not fail the others
                return False
            if response.status in _NO_SUCH_ROUTE:
                self.supported = False
                return False
            await _check(response)
            async for line in _lines(response):
                answer = json.loads(line)
                result = batch[answer["index"]][1]
                if not result.done():
                    result.set_result(answer["result"])
        return True

    async def close(self) -> None:
        for task in list(self._sending):
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RefusedBatch(response.status, response.headers, (await response.text())[:300])


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a response, of any length."""
    rest = b""
    async for data in response.content.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
