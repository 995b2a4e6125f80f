"""What the rank processes run: top-level functions, because they are pickled by name."""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rstar2_megatron.actor import offload, optimizer
from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.settings.schema import LrSchedSettings, OptimSettings
from rstar2_megatron.weights.checksum import weights_checksum

Batch = list[TrainSequence]


def _actor(rank: int, world_size: int, init_method: str, config: Any, model_path: Any) -> MegatronActor:
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    actor = MegatronActor(
        *config, model_path=str(model_path), rank=rank, world_size=world_size, init_method=init_method
    )
    actor.initialize()
    return actor


def train(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    batches: list[Batch],
    rows: int | None = None,
) -> list[dict[str, float]]:
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        return [actor.train_step(batch, mini_batch_rows=rows) for batch in batches]
    finally:
        actor.close()


def train_with_turns(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[Batch]
) -> tuple[list[dict[str, float]], bool]:
    """Like `train`, but the memory goes to an engine before each step; was everything away meanwhile, to the same host
    memory each time?
    """
    offload._SLAB = 1 << 12  # pieces smaller than a tensor
    actor = _actor(rank, world_size, init_method, config, model_path)
    history, away, taken = [], True, set()
    try:
        for batch in batches:
            weights = actor.weights_checksum()
            actor.offload(keep_weights=True)
            away &= weights == actor.weights_checksum()  # enough for a weight sync
            actor.offload()
            actor.offload()  # twice is once
            parameters = [p for chunk in actor.policy.chunks for p in chunk.parameters()]
            on_host = actor.optim.optimizer_cpu_offload  # then the state was never on the device
            tensors = parameters + [t for t in _optimizer_tensors(actor) if t.ndim and not on_host]
            away &= all(t.untyped_storage().size() == 0 for t in tensors)
            actor.reload()
            history.append(actor.train_step(batch))
            taken.add(actor._memory.host_bytes)
        return history, away and len(taken) <= 2  # the first step has no moments yet
    finally:
        actor.close()


def _optimizer_tensors(actor: MegatronActor) -> list[Tensor]:
    inner = [
        part.optimizer for part in actor.policy.optimizer.chained_optimizers if part.optimizer is not None
    ]
    masters = [p for part in inner for group in part.param_groups for p in group["params"]]
    return masters + [t for part in inner for state in part.state.values() for t in state.values()]


def train_with_reference(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[Batch]
) -> tuple[list[dict[str, float]], bool]:
    """Steps with a KL term to the initial weights; does scoring under them leave the policy untouched?"""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        actor.freeze_reference()
        history = [actor.train_step(batch) for batch in batches]
        before = actor.weights_checksum()
        actor._score_reference(batches[0])
        return history, before == actor.weights_checksum()
    finally:
        actor.close()


def first_step(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch
) -> tuple[float, float, float]:
    """(loss, gradient norm, sum of the embedding after) of one step."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        metrics = actor.train_step(batch)
        weights = dict(actor.iter_hf_weights())
        total = float(weights["model.embed_tokens.weight"].sum())
        return metrics["actor/policy_loss"], metrics["actor/grad_norm"], total
    finally:
        actor.close()


def round_trip(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, target: Path
) -> dict[str, Tensor]:
    """Export what was loaded; returns the streamed weights of this rank."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        weights = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
        checksums = actor.weights_checksum()
        assert checksums == weights_checksum(weights.items())
        actor.export_hf(target)
        return weights
    finally:
        actor.close()


def weights_after(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[Batch]
) -> dict[str, int]:
    """Checksums of what an engine would be sent right after the last of some steps."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        for batch in batches:
            actor.train_step(batch)
        return actor.weights_checksum()
    finally:
        actor.close()


def score(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch
) -> list[list[float]]:
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        return actor.compute_logprobs(batch)
    finally:
        actor.close()


def supervised(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch, steps: int
) -> tuple[list[dict[str, float]], dict[str, float], dict[str, float]]:
    """The validation loss, some SFT steps, then a fresh optimizer and one RL step."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        optim = OptimSettings(lr=2e-3, weight_decay=0.0)
        actor.reset_optimizer(optim, LrSchedSettings(lr_warmup_iters=0), steps)
        validation = actor.sft_validation(batch)
        history = [actor.sft_step(batch, lr=2e-3) for _ in range(steps)]
        actor.reset_optimizer(actor.actor.optim, actor.actor.lr_sched, 5)
        return history, actor.train_step(batch), validation
    finally:
        actor.close()


def save_then_train(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
    in_background: bool,
) -> tuple[list[dict[str, float]], bool]:
    """Two steps, a checkpoint, the remaining steps (an export where none remain).

    Also: was the directory there when training ended?
    """
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        for batch in batches[:2]:
            actor.train_step(batch)
        actor.save_checkpoint(directory, wait=not in_background)
        if not batches[2:]:
            actor.export_hf(directory.with_name("exported"))
        later = [actor.train_step(batch) for batch in batches[2:]]
        actor.finish_checkpoint()
        return later, directory.exists()
    finally:
        actor.close()


def save_on_a_slow_disk(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
) -> None:
    """A good checkpoint after two steps, then a second one over it whose files never reach the disk."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    for batch in batches[:2]:
        actor.train_step(batch)
    actor.save_checkpoint(directory)
    actor.train_step(batches[2])
    os.fsync = lambda fd: time.sleep(600)
    actor.save_checkpoint(directory)


def resume(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
) -> list[dict[str, float]]:
    """Load a checkpoint into a new actor that has already trained on something else, and go on."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        actor.train_step(batches[-1])
        actor.load_checkpoint(directory)
        return [actor.train_step(batch) for batch in batches[2:]]
    finally:
        actor.close()


def keep_and_resume(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
) -> tuple[list[float], list[float]]:
    """Rates of a run that goes on with the optimizer of two steps before it: in one go, and resumed after its first."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        for batch in batches[:2]:
            actor.train_step(batch)
        actor.keep_optimizer()
        first = actor.train_step(batches[2])["actor/lr"]
        actor.save_checkpoint(directory)
        rest = [actor.train_step(batch)["actor/lr"] for batch in batches[3:]]
        actor.reset_optimizer(actor.actor.optim, actor.actor.lr_sched, actor.max_optimizer_steps)
        actor.load_checkpoint(directory)
        return [first, *rest], [actor.train_step(batch)["actor/lr"] for batch in batches[3:]]
    finally:
        actor.close()


def poisoned(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch
) -> tuple[dict[str, float], bool]:
    """A step whose gradient is not finite: (metrics, are the weights untouched)."""
    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        before = actor.weights_checksum()
        for sequence in batch:
            sequence.advantage = float("inf")
        metrics = actor.train_step(batch)
        return metrics, actor.weights_checksum() == before
    finally:
        actor.close()


class _LocalGroup:
    """The actor of this rank where `sft.training` expects a worker group."""

    def __init__(self, actor: MegatronActor) -> None:
        self._actor = actor

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        if method == "sft_steps":
            return [[self._actor.sft_step(batch, lr=lr) for batch, lr in zip(*args, strict=True)]]
        return [getattr(self._actor, method)(*args)]


def fine_tune(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    rows: Any,
    phase: Any,
    checkpoint: Path,
    start: int,
) -> tuple[list[float], float]:
    """Losses of an SFT phase from step `start`, with a checkpoint after step 2; the validation loss at its end."""
    from rstar2_megatron.sft.training import run_phase, validation_loss

    actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        actor.reset_optimizer(OptimSettings(lr=phase.lr), LrSchedSettings(lr_warmup_iters=0), phase.steps)
        if start:
            actor.load_checkpoint(checkpoint)

        def after(done: int, steps: list[dict[str, float]]) -> None:
            if done == 2 and not start:
                actor.save_checkpoint(checkpoint)

        group: Any = _LocalGroup(actor)
        history = run_phase(group, phase, rows, 5, 60.0, start=start, pauses=(2,), after=after)
        return [step["sft/loss"] for step in history], validation_loss(group, rows, 4, 60.0)
    finally:
        actor.close()


def save_and_go_on(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[Batch],
    bucket_size: int | None = None,
) -> tuple[dict[str, int], dict[str, float]]:
    """A step, a checkpoint, another step: (checksums of the exported weights when saved, metrics of the second step)."""
    with _bucket_size(bucket_size):
        actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        actor.train_step(batches[0])
        actor.save_checkpoint(directory)
        return actor.weights_checksum(), actor.train_step(batches[1])
    finally:
        actor.close()


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside have made and that still live: at most, by kind of device."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def save_and_count(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batch: Batch,
    bucket_size: int,
) -> tuple[int, int]:
    """Bytes that a save and a load took at most on this rank, beside model and optimizer."""
    with _bucket_size(bucket_size if config[0].optim.overlap_grad_reduce else None):
        actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        actor.train_step(batch)
        with _LiveBytes() as count:
            actor.save_checkpoint(directory, wait=False)
        actor.finish_checkpoint()
        with _LiveBytes() as loading:
            actor.load_checkpoint(directory)
        return count.peak, loading.peak
    finally:
        actor.close()


def load_each(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directories: list[Path],
    batch: Batch,
    bucket_size: int | None = None,
) -> list[tuple[dict[str, int], dict[str, float]]]:
    """For each checkpoint, loaded into a new process group: (checksums of the weights, metrics of the next step)."""
    with _bucket_size(bucket_size):
        actor = _actor(rank, world_size, init_method, config, model_path)
    results = []
    try:
        for directory in directories:
            actor.load_checkpoint(directory)
            results.append((actor.weights_checksum(), actor.train_step(batch)))
        return results
    finally:
        actor.close()


@contextmanager
def _bucket_size(elements: int | None) -> Iterator[None]:
    """Buckets of about so many elements, as a model of billions has with megatron-core's 40 million."""
    plain = optimizer.DistributedDataParallelConfig
    if elements is not None:
        optimizer.DistributedDataParallelConfig = functools.partial(plain, bucket_size=elements)  # type: ignore
    try:
        yield
    finally:
        optimizer.DistributedDataParallelConfig = plain  # type: ignore[misc]
