"""The chunked vocabulary head equals torch's log_softmax over the whole vocabulary, values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rstar2_megatron.actor.network import logprob
from tests.actor.ranks import RankPool


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
            out = logprob.log_prob_entropy(hidden, weight, targets, temperature=0.7, chunk_tokens=16, group=dist.group.WORLD)
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


def heads(rank: int, world_size: int, init_method: str, seed: int, in_blocks: bool = False) -> dict[str, float]:
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


def head_gradient_in_bf16(rank: int, world_size: int, init_method: str, shared: bool) -> tuple[float, bool]:
    """Relative error of the weight's gradient over 512 chunks of the same tokens; whether DDP's hook gets one too."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    logprob._MIN_CHUNK_LOGITS, logprob._GRADIENT_WORDS = 1, 7
    try:
        torch.manual_seed(0)
        few, targets = torch.randn(4, 16).bfloat16(), torch.randint(24, (4,))
        weight: Any = torch.randn(24, 16).bfloat16().requires_grad_()
        weight.main_grad = torch.zeros(24, 16)
        weight.zero_out_wgrad = shared
        out = logprob.log_prob_entropy(
            few.repeat(512, 1), weight, targets.repeat(512), temperature=1.0, chunk_tokens=4, group=dist.group.WORLD
        )
        out[0].sum().backward()
        right = weight.detach().float().requires_grad_()
        log_p = (few.float() @ right.t()).log_softmax(-1)
        (512 * log_p.gather(-1, targets[:, None]).sum()).backward()
        assert right.grad is not None
        error = (weight.main_grad - right.grad).norm() / right.grad.norm()
        return float(error), weight.grad is not None
    finally:
        logprob._MIN_CHUNK_LOGITS, logprob._GRADIENT_WORDS = 1 << 24, 1 << 14
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "ranks, in_blocks", [(1, False), (2, False), (4, False), (2, True)], ids=["1", "2", "4", "2, as on CUDA"]
)
def test_head_equals_log_softmax(pool: RankPool, ranks: int, in_blocks: bool) -> None:
    for worst in pool.run(heads, ranks, 7, in_blocks):
        assert set(worst) == {"log_prob", "entropy", "hidden", "weight"}
        assert max(worst.values()) < 2e-5, worst


@pytest.mark.parametrize("shared", [False, True], ids=["own weight", "shared with an embedding"])
def test_low_precision_gradients_are_summed_in_the_fp32_buffer(pool: RankPool, shared: bool) -> None:
    """512 equal chunks: a bf16 sum would stop growing. DDP's hook waits for the embedding where that has the same weight."""
    error, returned = pool.run(head_gradient_in_bf16, 1, shared)[0]
    assert error < 1e-2
    assert returned is not shared


def test_on_cuda_logits_are_not_rounded(pool: RankPool) -> None:
    """bf16 inputs, fp32 products: log-probs equal an fp32 head's on the same inputs; gradients are rounded once."""
    log_prob, hidden, weight = pool.run(head_with_fp32_products, 1)[0]
    assert log_prob < 2e-6
    assert hidden < 5e-3 and weight < 5e-3
