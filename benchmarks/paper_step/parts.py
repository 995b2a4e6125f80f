"""CPU time of the parts of a program of one thread. Functions and coroutines are wrapped, nested ones counted apart."""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter
from collections.abc import Generator
from typing import Any


class Parts:
    """CPU seconds by part, without those of the parts called from it."""

    def __init__(self) -> None:
        self.seconds: Any = Counter()  # a Counter's values are typed as int
        self._open: list[str] = ["the rest: event loop, sockets"]
        self._since = time.thread_time()

    def start(self) -> None:
        """Count from here."""
        self.seconds.clear()
        self._since = time.thread_time()

    def stop(self) -> dict[str, float]:
        """The seconds of each part since `start`."""
        self._lap()
        return dict(self.seconds)

    def enter(self, part: str) -> None:
        self._lap()
        self._open.append(part)

    def leave(self) -> None:
        self._lap()
        self._open.pop()

    def _lap(self) -> None:
        now = time.thread_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def measure(self, part: str, owner: Any, *names: str) -> None:
        """Count the calls of functions of a class or a module for `part`; of a coroutine, each of its steps."""
        for name in names:
            function = getattr(owner, name)
            timed = self._timed_steps if inspect.iscoroutinefunction(function) else self._timed
            setattr(owner, name, timed(part, function))

    def _timed(self, part: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **keywords)
            finally:
                self.leave()

        return timed

    def _timed_steps(self, part: str, function: Any) -> Any:
        @functools.wraps(function)
        async def timed(*args: Any, **keywords: Any) -> Any:
            return await _Steps(self, part, function(*args, **keywords))

        return timed


class _Steps:
    """Awaits a coroutine and counts each step of it."""

    def __init__(self, parts: Parts, part: str, coroutine: Any) -> None:
        self._parts, self._part, self._coroutine = parts, part, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step, value = self._coroutine.send, None
        while True:
            self._parts.enter(self._part)
            try:
                waited = step(value)
            except StopIteration as end:
                return end.value
            finally:
                self._parts.leave()
            try:
                step, value = self._coroutine.send, (yield waited)
            except BaseException as error:
                step, value = self._coroutine.throw, error
