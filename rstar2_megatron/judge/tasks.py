"""Ends asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until all of them have ended. Their results and exceptions are dropped.

    One cancellation is not enough for a task that talks to Redis: redis-py sends by `asyncio.wait_for`, which before Python
    3.12 returns the result and forgets the cancellation when both arrive together. The task would go on for ever.
    """
    pending: Collection[asyncio.Future[Any]] = tasks
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
    await asyncio.gather(*tasks, return_exceptions=True)
