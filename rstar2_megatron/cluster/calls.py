"""Calls to worker groups with a deadline and typed failures.

RLinf's own `group.method().wait()` has no deadline, and ends the driver when a worker raises. These calls use the workers'
Ray handles instead. The driver gets an exception, which it can report before it cleans up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from rlinf.scheduler import Channel

from rstar2_megatron.extension.user_code import UserCodeError
from rstar2_megatron.records.disk import NotWritten

_LOW_MEMORY = "running low on memory"
_NOT_SAID = re.compile(r"(?s)^.*Worker exit detail: |Some common causes.*")  # of a death, in Ray's ten lines
_NODE_MEMORY = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")


class WorkerFailed(RuntimeError):
    """A worker raised an exception; the message holds its traceback."""


class WorkerLost(RuntimeError):
    """A worker process died; `rank` is its rank in the group, or -1."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class DeadlineExceeded(RuntimeError):
    """A worker did not answer in time."""


class NoEngineLeft(RuntimeError):
    """Every engine is lost for good. The trainer may start their workers again."""


def _out_of_memory(call: str, text: str) -> str:
    """What Ray says when its memory monitor ends a worker, in one sentence with the key to change."""
    figures = _NODE_MEMORY.search(text)
    used = f"{figures[1]} GB of {figures[2]} GB in use" if figures else "nearly all in use"
    return (
        f"{call}: Ray's memory monitor ended the worker, because the node's memory was full ({used}); end other programs, "
        "lower runner.max_tokens_per_mbs (activations) or rollout.max_total_tokens (KV cache), or place fewer ranks and "
        "engines by cluster.component_placement; --dry-run counts what each process takes"
    )


class PendingCall:
    """A call in flight on the workers `ranks` of a group.

    With `on_lost` a worker that dies is no failure: `on_lost` gets its rank and the reason, and the call goes on without it.
    """

    def __init__(
        self, name: str, refs: list[Any], ranks: Sequence[int], on_lost: Callable[[int, str], None] | None = None
    ) -> None:
        self.name = name
        self.refs = refs
        self._ranks = ranks
        self._on_lost = on_lost
        self._lost: set[int] = set()

    @property
    def ranks(self) -> list[int]:
        """Ranks of the workers that have not died during this call, in the order of the results."""
        return [rank for rank in self._ranks if rank not in self._lost]

    def result(self, timeout_s: float, beside: PendingCall | None = None) -> list[Any]:
        """Results in the order of `ranks`. Raises WorkerFailed, WorkerLost or DeadlineExceeded.

        The first failure is raised at once, even while other ranks hang in a collective with the failed one. A failure of
        `beside`, the call at the other end of a transfer, is also raised at once.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(self.refs)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self.name} did not finish within {timeout_s:.0f} s on {len(waiting)} of {len(self.refs)} workers"
                )
            done, waiting = ray.wait(waiting, num_returns=1, timeout=min(left, 1.0))
            self._raise_failures(done)
            if beside is not None:
                beside.check()
        return [ray.get(ref) for rank, ref in zip(self._ranks, self.refs) if rank not in self._lost]

    def check(self) -> None:
        """Raise if a worker of this call has failed so far. Never waits."""
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        self._raise_failures(done)

    def running(self, timeout_s: float = 0.0) -> list[int]:
        """Ranks of the workers that have not ended this call, with or without success, within `timeout_s`."""
        ended = set(ray.wait(self.refs, num_returns=len(self.refs), timeout=timeout_s)[0])
        return [rank for rank, ref in zip(self._ranks, self.refs, strict=True) if ref not in ended]

    def result_if_ended(self) -> list[Any] | None:
        """As `result` when every worker has ended this call, None before. Never waits."""
        return None if self.running() else self.result(1.0)

    def _raise_failures(self, done: Iterable[Any]) -> None:
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as e:
                if isinstance(e.cause, UserCodeError):  # it names the user's file and line
                    raise UserCodeError(str(e.cause)) from e
                if isinstance(e.cause, NotWritten):
                    raise e.cause from None
                raise WorkerFailed(f"{self.name} failed:\n{e}") from e
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as e:
                rank = self._ranks[self.refs.index(ref)]
                reason = (
                    _out_of_memory(self.name, str(e))
                    if isinstance(e, ray.exceptions.OutOfMemoryError) or _LOW_MEMORY in str(e)
                    else f"{self.name}, rank {rank}: the worker process died: {' '.join(_NOT_SAID.sub('', str(e)).split())}"
                )
                if self._on_lost is None:
                    raise WorkerLost(reason, rank) from e
                if rank not in self._lost:
                    self._lost.add(rank)
                    self._on_lost(rank, reason)


class WorkerGroup:
    """The workers of one RLinf worker group. The death of one fails every call."""

    on_lost: Callable[[int, str], None] | None = None
    """Of a group that goes on without a dead worker: `PendingCall`'s, for calls that name no ranks."""

    def __init__(self, name: str, rlinf_group: Any) -> None:
        self.name = name
        infos = rlinf_group.worker_info_list
        self.workers: list[Any] = [info.worker for info in infos]
        """Ray handles in rank order."""
        self.before: Callable[[str], None] | None = None
        """Called with the method's name before each call. Colocation uses it to put the right side to sleep."""
        self.lost: dict[int, str] = {}
        """Reasons by rank of workers that calls leave out."""

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(len(self)) if rank not in self.lost]

    def start(self, method: str, *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any) -> PendingCall:
        """Start `method(*args)` on all ranks that live, or on `ranks`, and return at once. Raises WorkerLost for a lost one."""
        if self.before is not None:
            self.before(method)
        chosen = list(self.alive if ranks is None else ranks)
        for rank in chosen:
            if rank in self.lost:
                raise WorkerLost(self.lost[rank], rank)
        refs = [getattr(self.workers[rank], method).remote(*args, **kwargs) for rank in chosen]
        return PendingCall(f"{self.name}.{method}", refs, chosen, self.on_lost if ranks is None else None)

    def call(self, method: str, *args: Any, timeout_s: float, ranks: Iterable[int] | None = None, **kwargs: Any) -> list[Any]:
        """`start(...).result(timeout_s)`."""
        return self.start(method, *args, ranks=ranks, **kwargs).result(timeout_s)

    def kill(self) -> None:
        for rank in self.alive:
            ray.kill(self.workers[rank])


class ChannelReader:
    """Reads one key of an RLinf channel from the driver, one item ahead of its caller.

    Cancelling a get on a channel would lose the item. So a get whose item has not arrived in time is kept for the next call.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel = channel
        self._key = key
        self._next = self._get()

    def _get(self) -> Any:
        """Begin a get; its Ray reference, which RLinf's own wait would wait for without a deadline."""
        return self._channel.get(key=self._key, async_op=True)._ray_object

    def poll(self, timeout_s: float) -> Any:
        """The next item, or None when none arrives in time. Raises WorkerLost when the channel is gone."""
        try:
            if not ray.wait([self._next], timeout=timeout_s)[0]:
                return None
            item = ray.get(self._next)
            self._next = self._get()
        except ray.exceptions.RayError as error:
            raise WorkerLost(f"the channel is gone: {error}") from error
        return item
