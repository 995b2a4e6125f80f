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

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rstar2_megatron.actor import offload, optimizer
from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.actor.network import logprob
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
            tensors = parameters + [t for t in _optimizer_tensors(actor) if t.ndim]
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


@contextmanager
def _as_on_cuda(wanted: bool = True) -> Iterator[None]:
    """The head's path for CUDA, small blocks included; torch's fp32 products of bf16 inputs exist on CUDA alone."""
    mm, addmm, plain, rows = torch.mm, torch.addmm, logprob._in_blocks, logprob._BLOCK_ROWS

    def product(a: Tensor, b: Tensor, out_dtype: Any = None, **keywords: Any) -> Tensor:
        return mm(a, b, **keywords) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

    def added(total: Tensor, a: Tensor, b: Tensor, out_dtype: Any, out: Tensor) -> Tensor:
        return addmm(total, a.to(out_dtype), b.to(out_dtype), out=out)

    if wanted:
        torch.mm, torch.addmm = product, added  # type: ignore[assignment]
        logprob._in_blocks, logprob._BLOCK_ROWS = lambda hidden: True, 3
    try:
        yield
    finally:
        torch.mm, torch.addmm = mm, addmm  # type: ignore[assignment]
        logprob._in_blocks, logprob._BLOCK_ROWS = plain, rows


def head_with_fp32_products(rank: int, world_size: int, init_method: str) -> tuple[float, float, float]:
    """Relative errors of log-probs and of the gradients of hidden states and weight, bf16 in, against an fp32 head."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    logprob._MIN_CHUNK_LOGITS = 1
    try:
        torch.manual_seed(0)
        hidden, targets = torch.randn(40, 64).bfloat16().requires_grad_(), torch.randint(24, (40,))
        weight: Any = torch.randn(24, 64).bfloat16().requires_grad_()
        weight.main_grad = torch.zeros(24, 64)
        with _as_on_cuda():
            out = logprob.log_prob_entropy(
                hidden, weight, targets, temperature=0.7, chunk_tokens=16, group=dist.group.WORLD
            )
            (out[0].sum() + 0.1 * out[1].sum()).backward()
        right_hidden, right_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
        log_p = (right_hidden @ right_weight.t() / 0.7).log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        (chosen.sum() - 0.1 * (log_p.exp() * log_p).sum()).backward()
        pairs = (out[0], chosen), (hidden.grad, right_hidden.grad), (weight.main_grad, right_weight.grad)
        log_prob, by_hidden, by_weight = (float((a - b).norm() / b.norm()) for a, b in pairs)  # type: ignore
        return log_prob, by_hidden, by_weight
    finally:
        logprob._MIN_CHUNK_LOGITS = 1 << 24
        dist.destroy_process_group()


def heads(
    rank: int, world_size: int, init_method: str, seed: int, in_blocks: bool = False
) -> dict[str, float]:
    """Largest differences between the chunked head over `world_size` ranks and torch's log_softmax on all."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    try:
        group = dist.group.WORLD
        torch.manual_seed(seed)
        hidden, weight = torch.randn(37, 16), torch.randn(24, 16)
        targets, by_logprob, by_entropy = torch.randint(24, (37,)), torch.randn(37), torch.randn(37)
        full_hidden, full_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_p = (full_hidden @ full_weight.t() / 0.7).log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (chosen @ by_logprob + entropy @ by_entropy).backward()
        worst: dict[str, float] = {}
        for smallest, words in ((1, 5), (1 << 24, 1 << 14)):  # many chunks with recompute; one chunk kept
            logprob._MIN_CHUNK_LOGITS, logprob._GRADIENT_WORDS = smallest, words
            for buffered in (False, True):
                own_hidden = hidden.clone().requires_grad_()
                own_weight = weight.chunk(world_size)[rank].clone().requires_grad_()
                if buffered:  # as under DDP, after another micro-batch
                    own_weight.main_grad = torch.ones_like(own_weight)  # type: ignore[attr-defined]
                with _as_on_cuda(in_blocks):
                    out = logprob.log_prob_entropy(
                        own_hidden, own_weight, targets, temperature=0.7, chunk_tokens=10, group=group
                    )
                    (out[0] @ by_logprob + out[1] @ by_entropy).backward()
                gradient: Any = own_weight.grad
                if buffered:
                    assert own_weight.grad_added_to_main_grad  # type: ignore[attr-defined]
                    gradient = own_weight.main_grad - 1  # type: ignore[attr-defined]
                assert own_hidden.grad is not None
                assert full_hidden.grad is not None and full_weight.grad is not None
                dist.all_reduce(own_hidden.grad)
                pairs = {
                    "log_prob": (out[0], chosen),
                    "entropy": (out[1], entropy),
                    "hidden": (own_hidden.grad, full_hidden.grad),
                    "weight": (gradient, full_weight.grad.chunk(world_size)[rank]),
                }
                for name, (mine, right) in pairs.items():
                    worst[name] = max(worst.get(name, 0.0), float((mine - right).abs().max()))
        return worst
    finally:
        logprob._MIN_CHUNK_LOGITS, logprob._GRADIENT_WORDS = 1 << 24, 1 << 14
        dist.destroy_process_group()


def head_gradient_in_bf16(rank: int, world_size: int, init_method: str, shared: bool) -> tuple[float, float]:
    """Relative error of the weight's gradient over 512 chunks of the same tokens; the largest value left for DDP."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    logprob._MIN_CHUNK_LOGITS, logprob._GRADIENT_WORDS = 1, 7
    try:
        torch.manual_seed(0)
        few, targets = torch.randn(4, 16).bfloat16(), torch.randint(24, (4,))
        weight: Any = torch.randn(24, 16).bfloat16().requires_grad_()
        weight.main_grad = torch.zeros(24, 16)
        weight.zero_out_wgrad = shared
        out = logprob.log_prob_entropy(
            few.repeat(512, 1),
            weight,
            targets.repeat(512),
            temperature=1.0,
            chunk_tokens=4,
            group=dist.group.WORLD,
        )
        out[0].sum().backward()
        right = weight.detach().float().requires_grad_()
        log_p = (few.float() @ right.t()).log_softmax(-1)
        (512 * log_p.gather(-1, targets[:, None]).sum()).backward()
        assert right.grad is not None
        error = (weight.main_grad - right.grad).norm() / right.grad.norm()
        return float(error), float(weight.grad.abs().max())
    finally:
        logprob._MIN_CHUNK_LOGITS, logprob._GRADIENT_WORDS = 1 << 24, 1 << 14
        dist.destroy_process_group()


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
) -> int:
    """Bytes that a save took at most on this rank, beside model and optimizer."""
    with _bucket_size(bucket_size if config[0].optim.overlap_grad_reduce else None):
        actor = _actor(rank, world_size, init_method, config, model_path)
    try:
        actor.train_step(batch)
        with _LiveBytes() as count:
            actor.save_checkpoint(directory, wait=False)
        actor.finish_checkpoint()
        return count.peak
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
