"""Calls reward functions of the user: plain ones in processes that can be killed, async ones in an event loop of their own.

A function that fails, hangs or takes too much memory gives a Score with the reason. It never gives a silent 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import threading
import time
from collections.abc import Sequence

from rstar2_megatron.reward.own import OwnReward, Score
from rstar2_megatron.reward.process import GradingProcess, Seat, Seats
from rstar2_megatron.trajectory import Problem, Trajectory

Item = tuple[Problem, Trajectory]

_FIRST_WAIT_S = 0.5  # before the second attempt of an async function; doubled for each further one
_BLOCKED_S = 5.0  # beyond its deadline, after which an event loop counts as blocked


class ProcessPool:
    """Plain functions. `timeout_s` bounds each call, `memory_mb` what a process takes beyond its libraries."""

    def __init__(self, functions: Sequence[OwnReward], num_processes: int, timeout_s: float, memory_mb: int) -> None:
        self._functions = list(functions)
        self._first = pickle.dumps(([(f.code, f.arguments) for f in functions], memory_mb))
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        self._seats = Seats(num_processes, self._start, "own reward")

    async def scores(self, items: Sequence[Item]) -> list[list[Score]]:
        """The scores of each item, one a function. Raises GraderLost, RuntimeError when closed."""
        size = max(1, -(-len(items) // self._num_processes))
        starts = range(0, len(items), size)
        parts = [self._seats.run(functools.partial(self._run, items[start : start + size])) for start in starts]
        done = await asyncio.gather(*map(asyncio.wrap_future, parts))
        return [scores for part in done for scores in part]

    def _run(self, items: Sequence[Item], seat: Seat) -> list[list[Score]]:
        done: list[list[Score]] = []
        while len(done) < len(items):
            self._fill(seat.process(), items, done)
        return done

    def _fill(self, process: GradingProcess, items: Sequence[Item], done: list[list[Score]]) -> None:
        """Add the scores of the items that have none, until the process dies. The one that killed it gets the reason."""
        if not process.send(pickle.dumps(items[len(done) :])):
            return
        for _ in range(len(items) - len(done)):
            scores: list[Score] = []
            for function in self._functions:
                begun = time.monotonic()
                reply = process.reply(self._timeout_s)
                if reply is None:
                    scores.append(self._lost(process, function, time.monotonic() - begun >= self._timeout_s))
                    done.append(scores)
                    return
                scores.append(pickle.loads(reply))
            done.append(scores)

    def _lost(self, process: GradingProcess, function: OwnReward, hung: bool) -> Score:
        label = function.code.label
        if hung and process.alive:
            process.kill()
            why = f"gave nothing within reward.function_timeout_s={self._timeout_s:g}"
            return Score(failure=f"reward {label} {why}", kind="Timeout")
        by = f"signal {process.signal} ended" if process.signal else "it ended"
        process.kill()
        return Score(failure=f"reward {label}: {by} its process (memory, or a library that crashed)", kind="Killed")

    def _start(self) -> GradingProcess:
        return GradingProcess("rstar2_megatron.reward.own_worker", first=self._first, quiet=False)

    def close(self) -> None:
        self._seats.close()


class AsyncCaller:
    """Async functions: at most `concurrency` calls at a time, each tried again `retries` times after a failure.

    `timeout_s` bounds one attempt.
    """

    def __init__(self, concurrency: int, timeout_s: float, retries: int) -> None:
        self._timeout_s = timeout_s
        self._retries = retries
        self._free = asyncio.Semaphore(concurrency)
        self._loop = asyncio.new_event_loop()
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="own async reward", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._turn)
        self._loop.run_forever()

    def _turn(self) -> None:
        self._last_turn = time.monotonic()
        self._loop.call_later(1.0, self._turn)

    async def score(self, function: OwnReward, item: Item) -> Score:
        """The function's score of one item."""
        call = asyncio.run_coroutine_threadsafe(self._score(function, item), self._loop)
        waiting = asyncio.wrap_future(call)
        while not (await asyncio.wait([waiting], timeout=1.0))[0]:
            if time.monotonic() - self._last_turn > self._timeout_s + _BLOCKED_S:
                waiting.cancel()
                why = f"blocks its event loop for {self._timeout_s:g} s; await what is slow, or make it a plain function"
                return Score(failure=f"reward {function.code.label} {why}", kind="Timeout")
        return waiting.result()

    async def _score(self, function: OwnReward, item: Item) -> Score:
        async with self._free:
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
                limit = asyncio.timeout(self._timeout_s)
                try:
                    async with limit:
                        returned = await function(*item)
                except Exception as error:
                    score = self._late(function) if limit.expired() else function.failed(error)
                else:
                    try:
                        return function.score(returned)
                    except (TypeError, ValueError) as error:  # another attempt would return the like
                        return function.failed(error)
            return score

    def _late(self, function: OwnReward) -> Score:
        why = f"gave nothing within reward.function_timeout_s={self._timeout_s:g}, {self._retries + 1} times"
        return Score(failure=f"reward {function.code.label} {why}", kind="Timeout")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)  # one that blocks ends with the process
        if not self._thread.is_alive():
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with contextlib.suppress(RuntimeError):
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                self._loop.close()
