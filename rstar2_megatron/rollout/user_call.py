"""Starts a function of the user: an async one in this loop, another in a thread of its own.

A thread cannot be ended. One that never returns holds up neither the loop nor the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Started = asyncio.Future[tuple[Any, BaseException | None]]
"""(value, None), or (None, what the function raised)."""


class TookTooLong(Exception):
    """The function ran past its limit."""


def start(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Started:
    """The running call. Cancelling it ends an async function."""
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):  # type: ignore[operator]
        return asyncio.ensure_future(_awaited(function, arguments, named))
    return _in_thread(function, arguments, named)


async def call_user(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any], limit_s: float) -> Any:
    """What the function returns. Raises TookTooLong, and what the function raises; of SystemExit, a RuntimeError."""
    work = start(function, arguments, named)
    try:
        done, _ = await asyncio.wait({work}, timeout=max(limit_s, 0.0))
    finally:
        work.cancel()
    if not done:
        raise TookTooLong
    value, failure = work.result()
    if isinstance(failure, Exception):
        raise failure
    if failure is not None:
        raise RuntimeError(f"{type(failure).__name__}: {failure}") from failure
    return value


async def _awaited(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, BaseException | None]:
    try:
        return await function(*arguments, **named), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the worker
        return None, error


def _in_thread(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Started:
    loop = asyncio.get_running_loop()
    future: Started = loop.create_future()

    def deliver(result: tuple[Any, BaseException | None]) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        try:
            result: tuple[Any, BaseException | None] = function(*arguments, **named), None
        except BaseException as error:  # it belongs to the call, whatever it is
            result = None, error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, result)

    threading.Thread(target=work, name=getattr(function, "__name__", "user's code"), daemon=True).start()
    return future
