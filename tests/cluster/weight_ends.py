"""The two ends of a weight sync as small RLinf workers. They import little, because every group starts two processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlinf.scheduler import Channel, Worker
from safetensors.torch import load_file

from rstar2_megatron.algorithm.batch import TrainBatch, TrainSequence
from rstar2_megatron.cluster import weight_transfer
from rstar2_megatron.cluster.tokens import read_batch
from rstar2_megatron.cluster.weight_transfer import Sent, WeightReceiver, WeightSender
from rstar2_megatron.weights.checksum import weights_checksum
from rstar2_megatron.weights.cuda_ipc import open_device_bucket
from rstar2_megatron.weights.route import Place, WeightRoute
from rstar2_megatron.weights.shared_memory import WeightBucket


def _tensors() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    tensors = [(f"layer.{i}.weight", torch.randn(100, 10 + i)) for i in range(7)]
    return [*tensors, ("half", torch.randn(33).bfloat16()), ("large", torch.randn(3, 5000)), ("strided", torch.randn(6, 4).t())]


STUCK_S = 3600.0
FORGET = "WeightSender.forget"


@dataclass
class Fault:
    """Call number `at` (from 0) of `name` in the module `cluster.weight_transfer` fails, once.

    how: "raise"; "hang": a coroutine that never ends; "stick": a call that blocks its thread; "die": the process is killed;
    "blank": the tensor that the coroutine returns holds nothing, as after an error that RLinf only logs.
    """

    name: str
    at: int = 0
    how: str = "raise"
    fired: bool = False


@contextlib.contextmanager
def planted(module: Any, fault: Fault | None) -> Iterator[None]:
    """While inside, the fault is there."""
    if fault is None:
        yield
        return
    owner, _, name = fault.name.rpartition(".")
    holder = getattr(module, owner) if owner else module
    original, calls = getattr(holder, name), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not fault.fired and next(calls) >= fault.at:
            fault.fired = True
            if fault.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.how == "blank":
                return _blank(original(*args, **kwargs))
            if fault.how == "hang":
                return asyncio.Event().wait()
            if fault.how == "stick":
                time.sleep(STUCK_S)
            raise RuntimeError(f"planted in {fault.name}")
        return original(*args, **kwargs)

    setattr(holder, name, call)
    try:
        yield
    finally:
        setattr(holder, name, original)


async def _blank(received: Awaitable[torch.Tensor]) -> torch.Tensor:
    return torch.zeros_like(await received)


class Sender(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """As launched: no fault, weights of its own."""
        self._fault: Fault | None = None
        self._model: tuple[str, float] | None = None

    def rank(self) -> int:
        return self._rank

    def pid(self) -> int:
        return os.getpid()

    def hang(self, until: str, fails: int | None = None) -> str:
        """Wait for the file `until`, as in a collective with a rank that is gone. Rank `fails` raises instead."""
        if self._rank == fails:
            raise ValueError(f"no luck on rank {fails}")
        while not Path(until).exists():
            time.sleep(0.01)
        return "woke up"

    def reload(self) -> None:
        """Nothing is on an accelerator."""

    def offload(self, keep_weights: bool = False) -> None:
        """As `reload`."""

    def place(self) -> Place:
        return Place(self._cluster_node_rank, (self._rank,))  # CPU slots have no accelerators

    def send(self, route: WeightRoute, engines: list[Any]) -> tuple[Sent, dict[str, int]]:
        """Figures of a sync of some tensors of several types and shapes, and their checksums."""
        tensors = self.tensors()
        self._sender = WeightSender(self)
        in_forget = self._fault is not None and self._fault.name == FORGET
        with planted(weight_transfer, None if in_forget else self._fault):
            return self._sender.send(iter(tensors), route, engines), weights_checksum(tensors)

    def forget_weights(self) -> None:
        """A fault in `FORGET` is one of this call only: a transfer also begins with it."""
        with planted(weight_transfer, self._fault):
            self._sender.forget()

    def send_weights(self, route: WeightRoute, engines: list[Any]) -> Sent:
        return self.send(route, engines)[0]

    def plant(self, fault: Fault) -> None:
        """The next transfer fails at this step of sending."""
        self._fault = fault

    def fired(self) -> bool:
        return self._fault is not None and self._fault.fired

    def use_model(self, directory: str, factor: float) -> None:
        """Send this model's weights times `factor`."""
        self._model = (directory, factor) if directory else None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        if self._model is None:
            return _tensors()
        directory, factor = self._model
        return [(n, t * factor) for n, t in load_file(f"{directory}/model.safetensors").items()]

    def weights_checksum(self) -> dict[str, int]:
        """Of what `send` sends."""
        return weights_checksum(self.tensors())

    def read(self, batch: TrainBatch) -> list[TrainSequence]:
        """A batch of tokens, as every actor rank reads it."""
        return read_batch(batch)

    def sums(self, batch: TrainBatch, prompt_tokens: int) -> list[int]:
        """Of the responses of a batch."""
        return [int(s.input_ids[prompt_tokens:].sum(dtype=int)) for s in read_batch(batch)]

    def die_reading(self, batch: TrainBatch, until: str) -> None:
        """Rank 1 is killed after it has read the batch, the others hang."""
        read_batch(batch)
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.hang(until)


def read_bucket(bucket: WeightBucket) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as an engine reads them."""
    load = bucket.load()
    if "path" in load:
        return list(load_file(load["path"]).items())
    return [item for handle in load["handles"] for item in open_device_bucket(handle)]


def read_kept(path: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a host copy's bucket."""
    return list(load_file(path).items())


weight_transfer.read_bucket = read_bucket  # type: ignore[attr-defined]  # steps at which a fault can be planted
weight_transfer.read_kept = read_kept  # type: ignore[attr-defined]


def as_on_gpus(worker: Any) -> Place:
    """The place of a rollout worker as on accelerators of its own, which CPU slots are not."""
    return Place(worker._cluster_node_rank, (worker._number,), (worker._group_name, worker._rank))


class Receiver(Worker):
    def __init__(self, engine: int | None = None) -> None:
        super().__init__()
        self._number = self._rank if engine is None else engine
        self._receiver = WeightReceiver(self, self._number)
        self.reset()

    def reset(self) -> None:
        """As launched: no fault, sees and keeps everything."""
        self._fault: Fault | None = None
        self._hidden: str | None = None
        self._lost: str | None = None

    async def receive(self, route: WeightRoute) -> tuple[dict[str, int], int]:
        """Checksums of what arrived, and in how many buckets."""
        sums: dict[str, int] = {}
        count = 0
        flags = []
        failure = "stopped receiving"
        try:
            with planted(weight_transfer, self._fault):
                async for bucket, last in self._receiver.begin(route):
                    flags.append(last)
                    sums.update(weights_checksum(weight_transfer.read_bucket(bucket)))
                    bucket.close()
                    count += 1
            failure = ""
        except Exception as error:
            failure = str(error)
            raise
        finally:
            self._receiver.end(route, failure)
        assert flags == [False] * (count - 1) + [True]
        return sums, count

    async def deliver_weights(self, route: WeightRoute, sender: int, number: int, item: Any, last: bool) -> str:
        return await self._receiver.deliver(route, sender, number, item, last, self._engine_workers)

    async def abort_weights(self, route: WeightRoute, reason: str) -> None:
        self._receiver.abort(route, reason)

    async def keep_weights(self, paths_of_nodes: dict[int, list[str]], version: int) -> str:
        self._kept = {}
        with planted(weight_transfer, self._fault):
            for path in paths_of_nodes.get(self._cluster_node_rank, []):
                self._kept.update(weights_checksum(weight_transfer.read_kept(path)))
        return ""

    async def kept(self) -> dict[str, int]:
        """Checksums of the host copy."""
        return self._kept

    async def set_engine_workers(self, engine_workers: list[Any]) -> None:
        self._engine_workers = engine_workers

    def plant(self, fault: Fault) -> None:
        """The next transfer fails at this step of receiving."""
        self._fault = fault

    def fired(self) -> bool:
        return self._fault is not None and self._fault.fired

    async def engine_lost(self) -> bool:
        return False

    async def place(self) -> Place:
        return as_on_gpus(self)

    def hide(self, prefix: str | None) -> None:
        """From now on paths that begin so cannot be opened here, as in a container of its own."""
        self._hidden = prefix

    async def receive_weights(self, route: WeightRoute, version: int) -> str:
        """Keep the checksums and the version."""
        original = weight_transfer.OpenedBucket

        def opened(path: str) -> weight_transfer.OpenedBucket:
            if self._hidden is not None and path.startswith(self._hidden):
                raise FileNotFoundError(f"{path} is not in this container")
            return original(path)

        weight_transfer.OpenedBucket = opened  # type: ignore[assignment,misc]
        try:
            sums, _ = await self.receive(route)
        finally:
            weight_transfer.OpenedBucket = original  # type: ignore[misc]
        if self._lost is not None:
            sums[self._lost] = 0
        self._held = (version, sums)
        return ""

    def lose(self, name: str | None) -> None:
        """From now on this tensor never reaches the model."""
        self._lost = name

    async def held(self) -> tuple[int, dict[str, int]]:
        return self._held

    async def weights_checksum(self) -> dict[str, int]:
        return self._held[1]

    async def echo(self, channel: Channel) -> int:
        """Move items from key "in" to key "out" until None; returns how many."""
        count = 0
        while (item := await channel.get(key="in", async_op=True).async_wait()) is not None:
            await channel.put((self._rank, item), key="out", async_op=True).async_wait()
            count += 1
        return count
