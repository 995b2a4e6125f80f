"""What the rank processes run: top-level functions, because they are pickled by name."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rstar2_megatron.actor import offload, optimizer
from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.settings.schema import LrSchedSettings, OptimSettings
from rstar2_megatron.weights.checksum import weights_checksum

Batch = list[TrainSequence]


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


@contextmanager
def open_actor(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Any, bucket_size: int | None = None
) -> Iterator[MegatronActor]:
    """An actor that is closed at the end; `bucket_size`: elements of a gradient bucket, megatron-core's by default."""
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    actor = MegatronActor(*config, model_path=str(model_path), rank=rank, world_size=world_size, init_method=init_method)
    with _bucket_size(bucket_size):
        actor.initialize()
    try:
        yield actor
    finally:
        actor.close()


def train(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[Batch], rows: int | None = None
) -> list[dict[str, float]]:
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        return [actor.train_step(batch, mini_batch_rows=rows) for batch in batches]


def train_with_turns(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[Batch]
) -> tuple[list[dict[str, float]], bool]:
    """Like `train`, but the memory goes to an engine before each step; was everything away meanwhile, to the same host
    memory each time?
    """
    offload._SLAB = 1 << 12  # pieces smaller than a tensor
    history, away, taken = [], True, set()
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
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
            taken.add(sum(len(slabs._slabs) for slabs in actor._memory._slabs.values()))
        return history, away and len(taken) <= 2  # the first step has no moments yet


def _optimizer_tensors(actor: MegatronActor) -> list[Tensor]:
    inner = [part.optimizer for part in actor.policy.optimizer.chained_optimizers if part.optimizer is not None]
    masters = [p for part in inner for group in part.param_groups for p in group["params"]]
    return masters + [t for part in inner for state in part.state.values() for t in state.values()]


def train_with_reference(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[Batch]
) -> tuple[list[dict[str, float]], bool]:
    """Steps with a KL term to the initial weights; does scoring under them leave the policy untouched?"""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        actor.freeze_reference()
        history = [actor.train_step(batch) for batch in batches]
        before = actor.weights_checksum()
        actor._score_reference(batches[0])
        return history, before == actor.weights_checksum()


def first_step(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch
) -> tuple[float, float, float]:
    """(loss, gradient norm, sum of the embedding after) of one step."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        metrics = actor.train_step(batch)
        weights = dict(actor.iter_hf_weights())
        total = float(weights["model.embed_tokens.weight"].sum())
        return metrics["actor/policy_loss"], metrics["actor/grad_norm"], total


def round_trip(rank: int, world_size: int, init_method: str, config: Any, model_path: Path, target: Path) -> dict[str, Tensor]:
    """Export what was loaded; returns the streamed weights of this rank."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        weights = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
        checksums = actor.weights_checksum()
        assert checksums == weights_checksum(weights.items())
        actor.export_hf(target)
        return weights


def weights_after(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[Batch]
) -> dict[str, int]:
    """Checksums of what an engine would be sent right after the last of some steps."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        for batch in batches:
            actor.train_step(batch)
        return actor.weights_checksum()


def score(rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch) -> list[list[float]]:
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        return [row.tolist() for row in actor.compute_logprobs(batch)]


def supervised(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch, steps: int
) -> tuple[list[dict[str, float]], dict[str, float], dict[str, float]]:
    """The validation loss, some SFT steps, then a fresh optimizer and one RL step."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        optim = OptimSettings(lr=2e-3, weight_decay=0.0)
        actor.reset_optimizer(optim, LrSchedSettings(lr_warmup_iters=0), steps)
        validation = actor.sft_validation(batch)
        history = [actor.sft_step(batch, lr=2e-3) for _ in range(steps)]
        actor.reset_optimizer(actor.actor.optim, actor.actor.lr_sched, 5)
        return history, actor.train_step(batch), validation


def poisoned(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batch: Batch
) -> tuple[dict[str, float], bool]:
    """A step whose gradient is not finite: (metrics, are the weights untouched)."""
    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        before = actor.weights_checksum()
        for sequence in batch:
            sequence.advantage = float("inf")
        metrics = actor.train_step(batch)
        return metrics, actor.weights_checksum() == before


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
    from rstar2_megatron.sft import training

    training.put_sequences = list  # type: ignore[assignment]  # without Ray: this process trains on them itself

    with open_actor(rank, world_size, init_method, config, model_path) as actor:
        actor.reset_optimizer(OptimSettings(lr=phase.lr), LrSchedSettings(lr_warmup_iters=0), phase.steps)
        if start:
            actor.load_checkpoint(checkpoint)

        def after(done: int, steps: list[dict[str, float]]) -> None:
            if done == 2 and not start:
                actor.save_checkpoint(checkpoint)

        group: Any = _LocalGroup(actor)
        history = training.run_sft_phase(group, phase, rows, 5, 60.0, start=start, pauses=(2,), after=after)
        return [step["sft/loss"] for step in history], training.validation_loss(group, rows, 4, 60.0)
