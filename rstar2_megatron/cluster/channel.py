"""The rollout channel: its streams, each under its own key, and a sender that batches."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlinf.scheduler import Channel

from rstar2_megatron.rollout.messages import RolloutResult

# rollout workers -> reward workers: list[RolloutResult] as bytes, then one None per reward worker
ENDED = "ended"
# reward workers -> driver: graded list[RolloutResult] as bytes; rollout workers -> driver: WorkRequest, EngineGone
TO_DRIVER = "to driver"
_REST = 4  # an Outbox pauses for so many times the seconds of its last message,
_LONGEST_PAUSE_S = 0.25  # but not longer


def work_key(worker: str) -> str:
    """driver -> one rollout worker: WorkAnswer.

    worker: its name in RLinf. A restarted worker has another one, so a request of its dead predecessor takes no answer.
    """
    return f"work {worker}"


def over_ray(channel: Channel) -> Channel:
    """This worker's end of the channel, by Ray calls as the driver's end.

    RLinf otherwise sends an item by a collective, in which the channel would wait for a worker that has died.
    """
    channel._current_worker = None
    return channel


def pack(results: list[RolloutResult]) -> bytes:
    """A message as bytes, which the channel's process copies; it unpickles and pickles any other object."""
    return pickle.dumps(results, protocol=5)


def unpack(message: bytes) -> list[RolloutResult]:
    results: list[RolloutResult] = pickle.loads(message)
    return results


class Outbox:
    """Sends items, and batches those that arrive while it sends or pauses.

    An RLinf channel takes about 100 messages a second from all its senders together. An outbox pauses after a message for four
    times the seconds that the message took, so the senders slow down as the channel gets slower.
    """

    def __init__(self, send: Callable[[list[Any]], Awaitable[Any]]) -> None:
        self.sent = 0
        self._send = send
        self._hurry = asyncio.Event()
        self._items: list[Any] = []
        self._sending: asyncio.Task[None] | None = None

    def add(self, item: Any) -> None:
        self._items.append(item)
        if self._sending is None or self._sending.done():
            if self._sending is not None:
                self._sending.result()  # raises the exception of the last send
            self._sending = asyncio.create_task(self._run())

    async def flush(self) -> None:
        """Wait until every item has been sent, without pauses. Raises the exception of a failed send."""
        self._hurry.set()
        if self._sending is not None:
            await self._sending

    async def close(self) -> None:
        """Drop the items that have not been sent."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _run(self) -> None:
        while self._items:
            items, self._items = self._items, []
            start = time.monotonic()
            await self._send(items)
            self.sent += len(items)
            with contextlib.suppress(TimeoutError):
                pause = min(_REST * (time.monotonic() - start), _LONGEST_PAUSE_S)
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
