"""Waiting for what a test expects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def until(
    condition: Callable[[], Any | Awaitable[Any]], what: str, timeout_s: float = 60.0, every_s: float = 0.02
) -> None:
    """Look again and again; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = condition()
        if await seen if isinstance(seen, Awaitable) else seen:
            return
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(every_s)
