"""The two ends of a weight sync: actor ranks send buckets, rollout workers receive them for their engines.

A sender passes each bucket to an engine's worker by a Ray call (`deliver_weights`) and waits until the engine has loaded
it. So a receiver's failure is the answer of a call, and every wait has a deadline. Only the broadcast route sends tensors by
RLinf's collectives. When one end has failed, the driver aborts the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from rlinf.scheduler import Worker
from torch import Tensor

from rstar2_megatron.settings.host_memory import available_memory, total_memory
from rstar2_megatron.weights.bucket import Bucket, Places, buckets
from rstar2_megatron.weights.checksum import weights_checksum
from rstar2_megatron.weights.cuda_ipc import DeviceBucket, handle_of
from rstar2_megatron.weights.route import WeightRoute
from rstar2_megatron.weights.shared_memory import OpenedBucket, SharedBucket, WeightBucket

SENDER_STEPS = 2
"""An engine waits this many `WeightRoute.step_timeout_s` for its next bucket: in one a sender may wait for another engine."""
_LOOK_S = 0.2
_KEEP_FREE = 0.1  # share of the host's memory that a copy of the weights must leave free


class TransferFailed(OSError):
    """A weight sync failed on this route; no engine has complete weights."""


@dataclass(slots=True)
class Sent:
    """Bytes and buckets that one actor rank sent, and the host copies that it wrote (cuda_ipc)."""

    num_bytes: int = 0
    num_buckets: int = 0
    host_copies: dict[int, str] = field(default_factory=dict)
    """Path by bucket number, on the rank's node; valid until `forget`."""


class WeightSender:
    """The sending end of one actor rank."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sent: list[SharedBucket] = []

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], route: WeightRoute, engines: list[Any]) -> Sent:
        """Iterate over the actor's weights and send them to `engines` (Ray handles of the rollout workers; None: lost).

        The iteration is collective over actor ranks. So a failure raises TransferFailed only after the iteration has ended.
        The buckets stay readable until `forget`.
        """
        sent = Sent()
        failure: Exception | None = None
        targets: list[Any] = []
        try:
            self.forget()
            targets = _targets(self._worker._rank, route, engines)
        except Exception as error:
            failure = error
        for number, (bucket, last) in enumerate(buckets(named_tensors, route.bucket_bytes)):
            sent.num_buckets = number + 1
            if failure is not None or not targets:
                continue
            try:
                self._send_bucket(bucket, last, number, route, targets, sent)
            except Exception as error:
                failure = error
        if failure is not None:
            raise TransferFailed(
                f"actor rank {self._worker._rank} could not send its weights by {route.kind}: "
                f"{type(failure).__name__}: {failure}"
            ) from failure
        return sent

    def forget(self) -> None:
        """Free the buckets of the last sync. Every receiver must have opened them before."""
        while self._sent:
            self._sent.pop().close()

    def _send_bucket(self, bucket: Bucket, last: bool, number: int, route: WeightRoute, targets: list[Any], sent: Sent) -> None:
        sent.num_bytes += bucket.data.nbytes
        if route.kind == "cuda_ipc":
            calls = self._deliver(targets, route, number, handle_of(bucket), last)
            if route.keeps_host_copy(self._worker._rank, number) and _fits_host(bucket.data.nbytes):
                self._sent.append(SharedBucket(bucket))  # while the engine reads the buffer
                sent.host_copies[number] = self._sent[-1].path
        elif route.kind == "broadcast":
            calls = self._deliver(targets, route, number, (bucket.places, weights_checksum(bucket.tensors())), last)
            work: Any = self._worker.broadcast(bucket.data, groups=_collective(route), async_op=True)
            _within(work, calls, route.step_timeout_s)
        else:
            path = None
            if route.kind == "disk":
                path = Path(route.directory) / f"weights-{number:05d}.safetensors"
                path.parent.mkdir(parents=True, exist_ok=True)
            self._sent.append(SharedBucket(bucket, path))
            calls = self._deliver(targets, route, number, self._sent[-1].path, last)
        _demand_loaded(calls, route.step_timeout_s)

    def _deliver(self, targets: list[Any], route: WeightRoute, number: int, item: Any, last: bool) -> list[Any]:
        rank = self._worker._rank
        return [target.deliver_weights.remote(route, rank, number, item, last) for target in targets]


def _targets(rank: int, route: WeightRoute, engines: list[Any]) -> list[Any]:
    """Handles of the engines to which this actor rank sends."""
    if route.kind == "cuda_ipc":
        engine = route.engine_of(rank)
        return [] if engine is None else [engines[engine]]
    if rank != 0:
        return []
    return [engines[engine] for engine in (route.leaders if route.kind == "broadcast" else route.engines)]


def _collective(route: WeightRoute) -> list[tuple[str, list[int]]]:
    """Groups and ranks that take part in the broadcast."""
    receivers = [route.addresses[leader] for leader in route.leaders]
    return [(route.actor_group, [0]), *((group, [rank]) for group, rank in receivers)]


def _demand_loaded(calls: list[Any], timeout_s: float) -> None:
    """Wait for the engines' answers. Raises TransferFailed when an engine refuses or does not answer in time."""
    try:
        _demand(ray.get(calls, timeout=timeout_s))
    except ray.exceptions.GetTimeoutError:
        raise TransferFailed(f"an engine did not load a bucket within {timeout_s:.0f} s") from None


def _demand(answers: list[str]) -> None:
    refused = [answer for answer in answers if answer]
    if refused:
        raise TransferFailed(refused[0])


def _within(work: Any, calls: list[Any], timeout_s: float) -> None:
    """Wait for a broadcast, whose own wait nothing can interrupt.

    Raises TransferFailed after `timeout_s`, or as soon as an engine refuses the bucket, which then may never join.
    """
    deadline = time.monotonic() + timeout_s
    while not work.done():
        if time.monotonic() >= deadline:
            raise TransferFailed(f"the broadcast of a bucket did not end within {timeout_s:.0f} s")
        answered, waiting = ray.wait(calls, num_returns=len(calls), timeout=_LOOK_S)
        _demand(ray.get(answered))
        if not waiting:  # all have the bucket, so this end is about to return
            time.sleep(0.01)
    work.wait()


def _fits_host(num_bytes: int) -> bool:
    return available_memory() - num_bytes > _KEEP_FREE * total_memory()


class WeightReceiver:
    """The receiving end of engine number `engine`. All methods belong to one event loop."""

    def __init__(self, worker: Worker, engine: int) -> None:
        self._worker = worker
        self._engine = engine
        self._transfer: _Transfer | None = None

    def begin(self, route: WeightRoute) -> AsyncIterator[tuple[WeightBucket, bool]]:
        """The buckets of one sync as they arrive, the last one flagged. Raises TransferFailed after `abort`.

        Requesting the next bucket marks the previous one as loaded.
        """
        return self._transfer_of(route).buckets()

    def end(self, route: WeightRoute, failure: str = "") -> None:
        """End the sync. Waiting deliveries are answered with `failure`, or "" for success."""
        self._transfer_of(route).answer(failure)

    def abort(self, route: WeightRoute, reason: str) -> None:
        """Abort the sync, because the sending end has failed. May be called before `begin`."""
        with contextlib.suppress(TransferFailed):  # a later sync has begun
            self._transfer_of(route).abort(reason)

    async def deliver(self, route: WeightRoute, sender: int, number: int, item: Any, last: bool, engines: list[Any]) -> str:
        """Take a bucket from actor rank `sender` (-1: from an engine of this node).

        item: a device handle (cuda_ipc), a path, or for a broadcast places and checksums of the tensors. Returns "" when the
        bucket is loaded, otherwise the reason. A failure to load never raises.
        """
        transfer = self._transfer_of(route)
        try:
            async with asyncio.timeout(route.step_timeout_s):
                if transfer.failure:
                    return transfer.failure
                if route.kind == "cuda_ipc":
                    return await transfer.add_part(self._engine, sender, number, item, last)
                if isinstance(item, tuple):
                    return await self._receive_broadcast(transfer, number, item, last, engines)
                return await transfer.put(OpenedBucket(item), last)
        except TimeoutError:
            return f"engine {self._engine} did not load bucket {number} within {route.step_timeout_s:.0f} s"
        except Exception as error:
            return f"engine {self._engine}, bucket {number}: {type(error).__name__}: {error}"

    async def _receive_broadcast(
        self, transfer: _Transfer, number: int, sent: tuple[Places, dict[str, int]], last: bool, engines: list[Any]
    ) -> str:
        """Receive a broadcast bucket into shared memory, and pass it to every engine of this node.

        RLinf logs an error of the collective and goes on with memory that nothing was written to, so checksums are compared.
        """
        route, rank = transfer.route, self._engine
        places, sums = sent
        bucket = Bucket(await self._join_broadcast(route), places)
        if weights_checksum(bucket.tensors()) != sums:
            raise TransferFailed("the tensors that arrived by broadcast are not those that were sent")
        shared = SharedBucket(bucket)
        try:
            others = [
                engines[follower].deliver_weights.remote(route, -1, number, shared.path, last)
                for follower in route.followers(rank)
            ]
            answers = await asyncio.gather(transfer.put(OpenedBucket(shared.path), last), *others)
        finally:
            shared.close()  # all receivers have opened it
        return next((answer for answer in answers if answer), "")

    async def _join_broadcast(self, route: WeightRoute) -> Tensor:
        work: Any = self._worker.broadcast(None, groups=_collective(route), async_op=True)
        data: Tensor = await work.async_wait()
        return data

    def _transfer_of(self, route: WeightRoute) -> _Transfer:
        """State of this sync. A delivery may arrive, and create the state, before the driver's call."""
        if self._transfer is None or self._transfer.route.attempt < route.attempt:
            self._transfer = _Transfer(route)
        if self._transfer.route.attempt != route.attempt:
            raise TransferFailed(f"weight sync {route.attempt} is over; another one has begun")
        return self._transfer


class _Transfer:
    """State of one sync: queues delivered buckets for the engine and answers their deliveries."""

    def __init__(self, route: WeightRoute) -> None:
        self.route = route
        self.failure = ""
        self._queue: asyncio.Queue[tuple[WeightBucket, bool] | None] = asyncio.Queue()
        self._parts: dict[int, dict[int, bytes]] = {}  # by bucket number: handle by actor rank (cuda_ipc)
        self._loaded: dict[int, asyncio.Future[str]] = {}  # answers by bucket number
        self._waiting: list[asyncio.Future[str]] = []  # answers not given yet, oldest first

    async def buckets(self) -> AsyncIterator[tuple[WeightBucket, bool]]:
        last, limit = False, SENDER_STEPS * self.route.step_timeout_s
        while not last:
            try:
                async with asyncio.timeout(limit):
                    item = await self._queue.get()
            except TimeoutError:
                raise TransferFailed(f"no bucket arrived within {limit:.0f} s: an actor rank is stuck") from None
            if item is None:
                raise TransferFailed(self.failure)
            yield item
            last = item[1]
            self._answer_oldest()

    async def put(self, bucket: WeightBucket, last: bool) -> str:
        """Queue a bucket for the engine and return the answer of its loading."""
        answer = self._expect()
        self._queue.put_nowait((bucket, last))
        return await answer

    async def add_part(self, engine: int, sender: int, number: int, handle: bytes, last: bool) -> str:
        """Add the handle of one tensor-parallel rank. The bucket is loaded when all handles have arrived."""
        ranks = self.route.actor_ranks[engine]
        parts = self._parts.setdefault(number, {})
        parts[sender] = handle
        if number not in self._loaded:
            self._loaded[number] = self._expect()
        if len(parts) == len(ranks):
            self._queue.put_nowait((DeviceBucket([parts[rank] for rank in ranks], num_bytes=0), last))
        return await asyncio.shield(self._loaded[number])

    def abort(self, reason: str) -> None:
        self.answer(reason or "the weight sync was aborted")
        self._queue.put_nowait(None)

    def answer(self, failure: str) -> None:
        """Answer every waiting delivery. A failure also answers later deliveries."""
        self.failure = self.failure or failure
        while self._waiting:
            self._answer_oldest(self.failure)

    def _expect(self) -> asyncio.Future[str]:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        return answer

    def _answer_oldest(self, failure: str = "") -> None:
        answer = self._waiting.pop(0)
        if not answer.done():
            answer.set_result(failure)
