"""Calls to worker groups with a deadline and typed failures.

RLinf's own `group.method().wait()` has no deadline, and ends the driver when a worker raises. These calls use the workers'
Ray handles instead. The driver gets an exception, which it can report before it cleans up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray
from rlinf.scheduler import Channel


class WorkerFailed(RuntimeError):
    """A worker raised an exception; the message holds its traceback."""


class WorkerLost(RuntimeError):
    """A worker process died."""


class DeadlineExceeded(RuntimeError):
    """A worker did not answer in time."""


class EnginesLost(RuntimeError):
    """Engines are lost and could not be restarted."""


class PendingCall:
    """A call in flight on some workers of a group."""

    def __init__(self, name: str, refs: list[Any]) -> None:
        self.name = name
        self.refs = refs

    def result(self, timeout_s: float, beside: PendingCall | None = None) -> list[Any]:
        """Results in rank order. Raises WorkerFailed, WorkerLost or DeadlineExceeded.

        The first failure is raised at once, even while other ranks hang in a collective with the failed one. A failure of
        `beside`, the call at the other end of a transfer, is also raised at once.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(self.refs)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self.name} did not finish within {timeout_s:.0f} s on {len(waiting)} of "
                    f"{len(self.refs)} workers"
                )
            done, waiting = ray.wait(waiting, num_returns=1, timeout=min(left, 1.0))
            self._raise_failures(done)
            if beside is not None:
                beside.check()
        return ray.get(self.refs)

    def check(self) -> None:
        """Raise if a worker of this call has failed so far. Never waits."""
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        self._raise_failures(done)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until every worker has ended this call, with or without success. False when `timeout_s` passes first."""
        ended, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=timeout_s)
        return len(ended) == len(self.refs)

    def result_if_ended(self) -> list[Any] | None:
        """As `result` when every worker has ended this call, None before. Never waits."""
        return self.result(1.0) if self.wait_for_end(0) else None

    def _raise_failures(self, done: Iterable[Any]) -> None:
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as e:
                raise WorkerFailed(f"{self.name} failed:\n{e}") from e
            except ray.exceptions.RayActorError as e:
                where = f"call {self.refs.index(ref)} of {len(self.refs)}"
                raise WorkerLost(f"{self.name}, {where}: the worker process died: {e}") from e


class WorkerGroup:
    """The workers of one RLinf worker group."""

    def __init__(self, name: str, rlinf_group: Any) -> None:
        self.name = name
        infos = rlinf_group.worker_info_list
        self.workers = [info.worker for info in infos]
        """Ray handles in rank order."""
        self.before: Callable[[str], None] | None = None
        """Called with the method's name before each call. Colocation uses it to put the right side to sleep."""

    def __len__(self) -> int:
        return len(self.workers)

    def start(
        self, method: str, *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any
    ) -> PendingCall:
        """Start `method(*args)` on all ranks (or on `ranks`) and return at once."""
        if self.before is not None:
            self.before(method)
        chosen = range(len(self.workers)) if ranks is None else ranks
        refs = [getattr(self.workers[rank], method).remote(*args, **kwargs) for rank in chosen]
        return PendingCall(f"{self.name}.{method}", refs)

    def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float,
        ranks: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """`start(...).result(timeout_s)`."""
        return self.start(method, *args, ranks=ranks, **kwargs).result(timeout_s)

    def kill(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


class _LastItem:
    """The item by which `ChannelReader.close` ends the reading thread."""


class ChannelReader:
    """Reads one key of an RLinf channel from the driver with a deadline.

    Cancelling a get on a channel would lose the item. So a thread does the blocking gets and puts the items into a queue.
    Call `close` before Ray is shut down: Ray ends the whole process, with its own exit code, if a thread is still inside a
    Ray call.
    """

    _END = object()

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel = channel
        self._key = key
        self._items: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(channel, key), daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the thread after the items that are already in the channel. False when it has not ended in time."""
        if self._thread.is_alive():
            self._channel.put(_LastItem(), key=self._key, async_op=True)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _read(self, channel: Channel, key: str) -> None:
        try:
            while not isinstance(item := channel.get(key=key), _LastItem):
                self._items.put(item)
            self._items.put((self._END, "closed"))
        except BaseException as e:  # the channel or Ray has ended (Ray raises SystemExit): tell the reader
            self._items.put((self._END, e))

    def get(self, timeout_s: float, while_waiting: Callable[[], None] | None = None) -> Any:
        """The next item. `while_waiting` is called about once a second and may raise to end the wait."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"nothing arrived on the channel within {timeout_s:.0f} s")
            try:
                item = self._items.get(timeout=min(1.0, left))
            except queue.Empty:
                if while_waiting is not None:
                    while_waiting()
                continue
            if isinstance(item, tuple) and len(item) == 2 and item[0] is self._END:
                raise WorkerLost(f"the channel is gone: {item[1]}")
            return item
