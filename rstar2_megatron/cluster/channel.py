"""The rollout channel: the keys of its streams, each under its own key, and a sender that batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

ENDED = "ended"  # rollout workers -> reward workers: list[RolloutResult], then one None per reward worker
# reward workers -> driver: graded list[RolloutResult]; rollout workers -> driver: WorkRequest, EngineGone
TO_DRIVER = "to driver"


def work_key(engine: int) -> str:
    """driver -> one rollout worker: WorkAnswer."""
    return f"work {engine}"


class Outbox:
    """Sends items as they arrive, and batches them while `send` is busy. An RLinf channel takes about 100 messages a second."""

    def __init__(self, send: Callable[[list[Any]], Awaitable[Any]]) -> None:
        self.sent = 0
        self._send = send
        self._items: list[Any] = []
        self._sending: asyncio.Task[None] | None = None

    def add(self, item: Any) -> None:
        self._items.append(item)
        if self._sending is None or self._sending.done():
            if self._sending is not None:
                self._sending.result()  # raises the exception of the last send
            self._sending = asyncio.create_task(self._run())

    async def flush(self) -> None:
        """Wait until every item has been sent. Raises the exception of a failed send."""
        if self._sending is not None:
            await self._sending

    async def close(self) -> None:
        """Drop the items that have not been sent."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _run(self) -> None:
        while self._items:
            items, self._items = self._items, []
            await self._send(items)
            self.sent += len(items)
