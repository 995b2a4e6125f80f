"""The two ends of a weight sync: actor ranks send buckets, rollout workers receive them for their engines.

What is announced travels by RLinf's broadcast; how the bytes themselves travel is the route's
(`weights/route.py`). A stream ends with an announcement None. Nobody is left waiting: a receiver that fails takes
the rest of the stream before it raises, a sender that fails announces (None, reason), and all receivers raise.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from rlinf.scheduler import Worker
from torch import Tensor

from rstar2_megatron.weights.cuda_ipc import DeviceBucket, flatten, handle_of
from rstar2_megatron.weights.route import WeightRoute
from rstar2_megatron.weights.shared_memory import OpenedBucket, SharedBucket, WeightBucket, group_tensors

Groups = list[tuple[str, list[int]]]


class WeightSender:
    """The actor's end, one for each rank."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sent: list[SharedBucket] = []

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], route: WeightRoute) -> dict[str, float]:
        """Walk the actor's weights (collective over actor ranks) and send them; bytes sent and seconds.

        The buckets stay readable until `forget`: receivers open them at their own pace. Raises OSError when a bucket
        cannot be written, after telling the receivers.
        """
        self.forget()
        start = time.perf_counter()
        rank = self._worker._rank
        total = 0
        if route.kind == "cuda_ipc":
            total = self._send_handles(named_tensors, route)
        elif rank == 0:
            failure: OSError | None = None
            for number, (tensors, last) in enumerate(group_tensors(named_tensors, route.bucket_bytes)):
                if failure is not None:  # the other ranks gather until the end of the iterator
                    continue
                total += sum(tensor.nbytes for tensor in tensors.values())
                try:
                    self._send_bucket(tensors, last, number, route)
                except OSError as error:
                    failure = error
            self._announce(None if failure is None else (None, str(failure)), route)
            if failure is not None:
                raise failure
        else:
            for _ in named_tensors:  # the gather behind the iterator is collective
                pass
        return {"bytes": float(total), "seconds": time.perf_counter() - start}

    def forget(self) -> None:
        """Free the buckets of the last sync; every receiver must have opened them."""
        while self._sent:
            self._sent.pop().close()

    def _send_bucket(self, tensors: dict[str, Tensor], last: bool, number: int, route: WeightRoute) -> None:
        if route.kind == "broadcast":
            self._announce(("tensors", last), route)
            # GPU tensors go over NCCL. RLinf takes a dict of plain tensors, all on one kind of device.
            self._worker.broadcast(tensors, groups=_receivers(route))
            return
        path = Path(route.directory) / f"weights-{number:05d}.safetensors" if route.kind == "disk" else None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._sent.append(SharedBucket(tensors, path))
        self._announce((self._sent[-1].path, last), route)

    def _announce(self, what: tuple[str, bool] | tuple[None, str] | None, route: WeightRoute) -> None:
        self._worker.broadcast(("weights", what), groups=_receivers(route))

    def _send_handles(self, named_tensors: Iterator[tuple[str, Tensor]], route: WeightRoute) -> int:
        """Every actor rank serves the engine on its GPU, which answers when it has read the buffer."""
        engine = route.engine_of(self._worker._rank)
        total = 0
        for tensors, last in group_tensors(named_tensors, route.bucket_bytes):
            if engine is None:
                continue
            flat, places = flatten(tensors)
            total += flat.nbytes
            self._worker.send((handle_of(flat, places), last), route.rollout_group, engine)
            self._worker.recv(route.rollout_group, engine)
            del flat
        if engine is not None:
            self._worker.send((None, True), route.rollout_group, engine)
        return total


def _receivers(route: WeightRoute) -> Groups:
    """Who hears the actor's first rank."""
    ranks = route.leaders if route.kind == "broadcast" else list(range(len(route.leader_of)))
    return [(route.actor_group, [0]), (route.rollout_group, ranks)]


async def receive_weights(worker: Worker, route: WeightRoute) -> AsyncIterator[tuple[WeightBucket, bool]]:
    """The buckets of one sync as they arrive, the last one flagged. Exhaust it, also after an error.

    Raises OSError, after taking the whole stream, when a bucket could not be opened here.
    """
    if route.kind == "cuda_ipc":
        async for item in _receive_handles(worker, route):
            yield item
        return
    rank = worker._rank
    leader = route.leader_of[rank]
    if route.kind != "broadcast":
        stream = _open_announced(worker, _receivers(route))
    elif rank == leader:
        stream = _receive_and_pass_on(worker, route)
    else:
        node = [(route.rollout_group, [leader, *route.followers(leader)])]
        stream = _open_announced(worker, node, tell=leader)
    async for item in stream:
        yield item


async def _open_announced(
    worker: Worker, source: Groups, tell: int | None = None
) -> AsyncIterator[tuple[WeightBucket, bool]]:
    """Open the paths that are announced on `source`; at the end tell engine `tell` that all are open."""
    failure: OSError | None = None
    while (what := (await _broadcast(worker, None, source))[1]) is not None:
        path, last = what
        if path is None:
            failure = failure or OSError(f"the sender of the weights failed: {last}")
            break
        if failure is None:
            try:
                bucket = OpenedBucket(path)
            except OSError as error:
                failure = error
            else:
                yield bucket, last
    if tell is not None:
        done: Any = worker.send("opened", source[0][0], tell, async_op=True)
        await done.async_wait()
    if failure is not None:
        raise failure


async def _receive_and_pass_on(
    worker: Worker, route: WeightRoute
) -> AsyncIterator[tuple[WeightBucket, bool]]:
    """Receive broadcast tensors into shared memory, for this engine and the others of its node."""
    source, followers = _receivers(route), route.followers(worker._rank)
    node: Groups = [(route.rollout_group, [worker._rank, *followers])]
    held: list[SharedBucket] = []
    failure: OSError | None = None
    try:
        while (what := (await _broadcast(worker, None, source))[1]) is not None:
            kind, last = what
            if kind is None:
                failure = failure or OSError(f"the sender of the weights failed: {last}")
                break
            tensors = await _broadcast(worker, None, source)
            if failure is not None:
                continue
            try:
                held.append(SharedBucket(tensors))
                opened = OpenedBucket(held[-1].path)
            except OSError as error:
                failure = error
                continue
            if followers:
                await _broadcast(worker, ("weights", (held[-1].path, last)), node)
            yield opened, last
        if followers:
            await _broadcast(worker, ("weights", None if failure is None else (None, str(failure))), node)
        for follower in followers:
            done: Any = worker.recv(route.rollout_group, follower, async_op=True)
            await done.async_wait()
    finally:
        for bucket in held:
            bucket.close()
    if failure is not None:
        raise failure


async def _broadcast(worker: Worker, what: Any, groups: Groups) -> Any:
    work: Any = worker.broadcast(what, groups=groups, async_op=True)
    return await work.async_wait()


async def _receive_handles(worker: Worker, route: WeightRoute) -> AsyncIterator[tuple[WeightBucket, bool]]:
    """Handles from the actor rank on each of the engine's devices; each is told when they have been read."""
    ranks = route.actor_ranks[worker._rank]
    while True:
        received = []
        for rank in ranks:
            work: Any = worker.recv(route.actor_group, rank, async_op=True)
            received.append(await work.async_wait())
        if received[0][0] is None:
            return
        handles = [handle for handle, _ in received]
        try:
            yield DeviceBucket(handles, num_bytes=0), received[0][1]
        finally:
            for rank in ranks:
                work = worker.send("read", route.actor_group, rank, async_op=True)
                await work.async_wait()
