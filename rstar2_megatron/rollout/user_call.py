"""Runs a function of the user: an async one in this loop, another in a thread.

A thread cannot be ended. One that never returns holds up neither the loop nor the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = tuple[Any, BaseException | None]  # (value, None), or (None, what the function raised)


class TookTooLong(Exception):
    """The function ran past its limit."""


class UserThread:
    """A thread for the calls of one instance, because sqlite3, Playwright and others bind what they make to its thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False
        self._late: asyncio.Future[Result] | None = None

    def note_late(self, work: asyncio.Future[Result]) -> None:
        """It runs on after its limit."""
        self._late = work

    @property
    def is_late(self) -> bool:
        """Whether what was given up still runs, so that nothing behind it would begin."""
        return self._late is not None and not self._late.done()

    def submit(self, work: Callable[[], None]) -> None:
        """Run it behind what was submitted before. The thread ends with this object."""
        if not self._started:
            threading.Thread(target=_run_all, args=(self._work,), name="user's code", daemon=True).start()
            weakref.finalize(self, self._work.put, None)
            self._started = True
        self._work.put(work)


def _run_all(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    for one in iter(work.get, None):
        one()


async def call_user(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    limit_s: float,
    failed: Callable[[BaseException], Exception],
    on_end: Callable[[Any], None] = lambda _: None,
    thread: UserThread | None = None,
) -> Any:
    """What the function returns. Raises TookTooLong, and `failed` of what the function raises.

    on_end: called when it has ended, which a thread may do after its limit. thread: of a plain function; None: a new one.
    """
    if thread is not None and thread.is_late:
        raise TookTooLong
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):  # type: ignore[operator]
        work: asyncio.Future[Result] = asyncio.ensure_future(_awaited(function, arguments, named))
    else:
        work = _in_thread(function, arguments, named, thread or UserThread())
    work.add_done_callback(on_end)
    try:
        done, _ = await asyncio.wait({work}, timeout=max(limit_s, 0.0))
    finally:
        if isinstance(work, asyncio.Task):
            work.cancel()
        elif thread is not None and not work.done():  # also where a deadline outside of this ends the wait
            thread.note_late(work)
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


def _in_thread(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any], thread: UserThread
) -> asyncio.Future[Result]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def work() -> None:
        try:
            result: Result = function(*arguments, **named), None
        except BaseException as error:  # it belongs to the call, whatever it is
            result = None, error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(future.set_result, result)

    thread.submit(work)
    return future
