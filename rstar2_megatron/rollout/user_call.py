"""Runs a function of the user: an async one in this loop, another in a thread of its own.

A thread cannot be ended. One that never returns holds up neither the loop nor the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = tuple[Any, BaseException | None]  # (value, None), or (None, what the function raised)


class TookTooLong(Exception):
    """The function ran past its limit."""


async def call_user(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    limit_s: float,
    failed: Callable[[BaseException], Exception],
    on_end: Callable[[Any], None] = lambda _: None,
) -> Any:
    """What the function returns. Raises TookTooLong, and `failed` of what the function raises.

    on_end: called when it has ended, which a thread may do after its limit.
    """
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):  # type: ignore[operator]
        work: asyncio.Future[Result] = asyncio.ensure_future(_awaited(function, arguments, named))
    else:
        work = _in_thread(function, arguments, named)
    work.add_done_callback(on_end)
    try:
        done, _ = await asyncio.wait({work}, timeout=max(limit_s, 0.0))
    finally:
        if isinstance(work, asyncio.Task):
            work.cancel()
    if not done:
        raise TookTooLong
    value, failure = work.result()
    if failure is not None:
        raise failed(failure) from failure
    return value


async def _awaited(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Result:
    try:
        return await function(*arguments, **named), None
    except BaseException as error:  # SystemExit would end the worker
        return None, error


def _in_thread(function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> asyncio.Future[Result]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def work() -> None:
        try:
            result: Result = function(*arguments, **named), None
        except BaseException as error:  # it belongs to the call, whatever it is
            result = None, error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=work, name=getattr(function, "__name__", "user's code"), daemon=True).start()
    return future
