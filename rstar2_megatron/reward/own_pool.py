"""Calls reward functions of the user: plain ones in processes that can be killed, async ones in an event loop of their own.

A function that fails, hangs or takes too much memory gives a Grade with the reason. It never gives a silent 0.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from rstar2_megatron.reward.own import OwnReward
from rstar2_megatron.reward.pool import Grade
from rstar2_megatron.reward.process import GradingProcess, GradingProcesses
from rstar2_megatron.trajectory import Problem, Trajectory

Item = tuple[Problem, Trajectory]

_FIRST_WAIT_S = 0.5  # before the second attempt of an async function; doubled for each further one
_BLOCKED_S = 5.0  # beyond its deadline, after which an event loop counts as blocked


class ProcessPool:
    """Plain functions by name. `timeout_s` bounds each call, `memory_mb` what a process takes beyond its libraries."""

    def __init__(self, functions: Mapping[str, OwnReward], num_processes: int, timeout_s: float, memory_mb: int) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        named = {name: (function.code, function.arguments) for name, function in functions.items()}
        self._processes = GradingProcesses(num_processes, "own", (named, memory_mb), quiet=False)

    async def grades(self, name: str, items: Sequence[Item]) -> list[Grade]:
        """The grades of the items by the function `name`. Raises GraderLost, RuntimeError when closed."""
        size = max(1, -(-len(items) // self._num_processes))
        starts = range(0, len(items), size)
        parts = [self._processes.run(functools.partial(self._run, name, items[start : start + size])) for start in starts]
        return [grade for part in await asyncio.gather(*map(asyncio.wrap_future, parts)) for grade in part]

    def _run(self, name: str, items: Sequence[Item], process: GradingProcess) -> list[Grade]:
        """One request for all; the item that ends the process gets the reason, and those behind it a new process."""
        done: list[Grade] = []
        while len(done) < len(items):
            process.start()
            waiting = process.send(pickle.dumps((name, items[len(done) :])))
            while waiting and len(done) < len(items):
                reply = process.reply(self._timeout_s)
                done.append(pickle.loads(reply) if reply else self._lost(process, self._functions[name].code.label))
                waiting = reply is not None
        return done

    def _lost(self, process: GradingProcess, label: str) -> Grade:
        if process.hung:
            why = f"gave nothing within reward.function_timeout_s={self._timeout_s:g}"
            return Grade(failure=f"reward {label} {why}", kind="Timeout")
        by = f"signal {process.signal} ended" if process.signal else "it ended"
        return Grade(failure=f"reward {label}: {by} its process (memory, or a library that crashed)", kind="Killed")

    def close(self) -> None:
        self._processes.close()


class AsyncCaller:
    """Async functions: at most `concurrency` calls at a time, each tried again `retries` times after a failure.

    `timeout_s` bounds one attempt.
    """

    def __init__(self, concurrency: int, timeout_s: float, retries: int) -> None:
        self._timeout_s = timeout_s
        self._retries = retries
        self._free = asyncio.Semaphore(concurrency)
        self._closed = asyncio.Event()
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve(started)], name="own async reward", daemon=True)
        self._thread.start()
        self._loop = started.result()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._closed.wait()

    async def grade(self, function: OwnReward, item: Item) -> Grade:
        """The function's grade of one item."""
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._grade(function, item), self._loop))
        while not (await asyncio.wait([call], timeout=1.0))[0]:
            turn = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop))
            if not (await asyncio.wait([turn], timeout=self._timeout_s + _BLOCKED_S))[0]:
                call.cancel()
                why = f"blocks its event loop for {self._timeout_s:g} s; await what is slow, or make it a plain function"
                return Grade(failure=f"reward {function.code.label} {why}", kind="Timeout")
        return call.result()

    async def _grade(self, function: OwnReward, item: Item) -> Grade:
        async with self._free:
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
                call = asyncio.ensure_future(_called(function, item))
                try:
                    await asyncio.wait([call], timeout=self._timeout_s)
                finally:
                    late = not call.done()
                    call.cancel()  # which it may catch; then it is left behind
                await asyncio.sleep(0)
                # One that goes on keeps what it has begun: others beside it would exceed the concurrency.
                grade, again = (self._late(function), call.done()) if late else call.result()
                if not again:
                    return grade
            return grade

    def _late(self, function: OwnReward) -> Grade:
        why = f"gave nothing within reward.function_timeout_s={self._timeout_s:g}, {self._retries + 1} times"
        return Grade(failure=f"reward {function.code.label} {why}", kind="Timeout")

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join(1.0)  # one that blocks ends with the process


async def _called(function: OwnReward, item: Item) -> tuple[Grade, bool]:
    """The function's grade, and whether another attempt may give another."""
    try:
        returned = await function(*item)
    except BaseException as error:  # SystemExit would end the thread with every later grade
        return function.failed(error), True
    try:
        return function.grade(returned), False
    except Exception as error:
        return function.failed(error), False
