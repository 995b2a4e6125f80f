"""Log-prob and entropy of chosen tokens over a vocabulary split across tensor-parallel ranks, in chunks.

Full logits would be the largest tensor of a training step (16,384 tokens x 151,936 words x 4 bytes = 10 GB). Only the logits
of one chunk of tokens exist at a time; the backward pass computes them again. The gradient of the weight is added to the
fp32 gradient buffer of megatron-core's DDP.

In low precision on CUDA the matrix products return fp32, so logits are never rounded to bf16. Each chunk reads the whole
weight, so chunks are large there. All other arithmetic runs over blocks of a chunk's rows, and the gradient of the logits
overwrites the logits. Shapes: n predicted tokens, H hidden size, V/tp words of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

# Least logits of a chunk (64 MB in fp32): with a small vocabulary smaller chunks save no memory worth the time.
_MIN_CHUNK_LOGITS = 1 << 24
# Words whose weight gradient is computed in low precision at a time, before it is added in fp32.
_GRADIENT_WORDS = 1 << 14
# Rows of a block (156 MB of fp32 logits at 151,936 words).
_BLOCK_ROWS = 256


class _LogProbEntropy(torch.autograd.Function):
    """(hidden [n, H], weight [V/tp, H], targets [n]) -> [2, n]: log-prob of the target, entropy; both fp32.

    With z the logits over temperature, p = softmax(z), l = log p and E the entropy:
    d l_t / d z_j = [j = t] - p_j and d E / d z_j = -p_j (l_j + E).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, group: Any
    ) -> Tensor:
        first = group.rank() * weight.size(0)
        local = targets - first
        mine = (local >= 0) & (local < weight.size(0))
        local = local.clamp(0, weight.size(0) - 1)
        out = hidden.new_empty((2, hidden.size(0)), dtype=torch.float32)
        log_sums = hidden.new_empty(hidden.size(0), dtype=torch.float32)
        kept: Tensor | None = None
        for start in range(0, hidden.size(0), chunk):
            rows = slice(start, start + chunk)
            z = _logits(hidden[rows], weight, temperature)
            largest = z.amax(-1)
            if group.size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            z.sub_(largest[:, None])
            target_z = z.gather(-1, local[rows, None]).squeeze(-1).mul_(mine[rows])
            sums = torch.stack([*_exponential_sums(z, _in_blocks(hidden)), target_z])
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_sums[rows] = log_sum + largest
            out[0, rows] = sums[2] - log_sum
            out[1, rows] = log_sum - sums[1] / sums[0]
            if chunk >= hidden.size(0) and ctx.needs_input_grad[0] and not _in_blocks(hidden):
                kept = z.sub_(log_sum[:, None])  # a single chunk is kept for the backward pass
        ctx.save_for_backward(hidden, weight, local, mine, log_sums, out[1], *([] if kept is None else [kept]))
        ctx.temperature, ctx.chunk = temperature, chunk
        # DDP's gradient buffer is an attribute of the parameter.
        ctx.parameter = weight if getattr(weight, "main_grad", None) is not None else None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, local, mine, log_sums, entropy, *kept = ctx.saved_tensors
        by_logprob, by_entropy = grads[0].unbind(0)
        use_entropy = bool(by_entropy.any())
        grad_hidden = torch.empty_like(hidden)
        parameter = ctx.parameter
        if parameter is None:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        else:
            grad_weight = parameter.main_grad
        for start in range(0, hidden.size(0), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            if kept:
                log_p = kept[0]
            else:
                log_p = _logits(hidden[rows], weight, ctx.temperature).sub_(log_sums[rows, None])
            gradient = functools.partial(_gradient_of_logits, use_entropy, bool(kept), ctx.temperature)
            per_token = by_logprob[rows], by_entropy[rows], entropy[rows], local[rows], mine[rows]
            if _in_blocks(hidden):
                grad_logits = log_p.view(hidden.dtype)[
                    :, : weight.size(0)
                ]  # low precision, in the first half of each fp32 row's memory
                for block in _row_blocks(log_p):
                    grad_logits[block] = gradient(log_p[block], *(x[block] for x in per_token)).to(hidden.dtype)
            else:
                grad_logits = gradient(log_p, *per_token).to(hidden.dtype)
            grad_hidden[rows] = torch.mm(grad_logits, weight)  # with `out` a CPU would leave it to MKL (cpu/products.py)
            _add_outer(grad_weight, grad_logits, hidden[rows])
            del log_p, grad_logits
        if parameter is None:
            return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
        # DDP waits for a returned gradient. The flag tells DDP that the buffer has it already. With an embedding of this rank
        # that has the same weight, DDP waits for the embedding's gradient, and adds it all the same.
        parameter.grad_added_to_main_grad = True
        shared = getattr(parameter, "zero_out_wgrad", False)
        return grad_hidden, None if shared else torch.empty_like(weight), None, None, None, None


def _in_blocks(hidden: Tensor) -> bool:
    """True in low precision on CUDA: chunks are large, and matrix products return fp32."""
    return hidden.is_cuda and hidden.dtype != torch.float32


def _row_blocks(z: Tensor) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, z.size(0), _BLOCK_ROWS))


def _exponential_sums(z: Tensor, in_blocks: bool) -> tuple[Tensor, Tensor]:
    """Sums over the words of exp(z) and of z exp(z), [n] each."""
    if in_blocks:
        parts = [_exponential_sums(z[block], False) for block in _row_blocks(z)]
        return torch.cat([e for e, _ in parts]), torch.cat([ez for _, ez in parts])
    e = z.exp()
    return e.sum(-1), torch.linalg.vecdot(e, z)


def _gradient_of_logits(
    use_entropy: bool,
    keep: bool,
    temperature: float,
    log_p: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
    entropy: Tensor,
    local: Tensor,
    mine: Tensor,
) -> Tensor:
    """fp32 gradient of the logits [n, V/tp] from the gradients of log-probs and entropies [n].

    It overwrites `log_p` unless `keep`.
    """
    p = log_p.exp() if keep or use_entropy else log_p.exp_()
    if use_entropy:
        log_p = log_p + entropy[:, None] if keep else log_p.add_(entropy[:, None])
        grad_z = p.mul_(log_p.mul_(by_entropy[:, None]).add_(by_logprob[:, None])).neg_()
    else:
        grad_z = p.mul_(-by_logprob[:, None])
    grad_z.scatter_add_(-1, local[:, None], (by_logprob * mine)[:, None])
    return grad_z if temperature == 1.0 else grad_z.div_(temperature)


def _add_outer(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """total [V/tp, H] += grad_logits^T hidden, in the precision of `total`."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
    elif _in_blocks(hidden):
        torch.addmm(total, grad_logits.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        for start in range(0, total.size(0), _GRADIENT_WORDS):
            words = slice(start, start + _GRADIENT_WORDS)
            total[words].add_(torch.mm(grad_logits[:, words].t(), hidden))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """fp32 logits divided by the temperature, [n, V/tp]; a new tensor that the caller may overwrite."""
    if _in_blocks(hidden):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def log_prob_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk_tokens: int, group: Any
) -> Tensor:
    """Log-probs (row 0) and entropies (row 1), fp32 [2, n], equal on every tensor-parallel rank.

    hidden [n, H] is equal on all ranks of `group`, weight [V/tp, H] holds this rank's rows, targets [n] are global token
    ids. The gradient of hidden is this rank's summand; the caller reduces it over the group.
    """
    chunk = max(chunk_tokens, _MIN_CHUNK_LOGITS // weight.size(0), 1)
    result = _LogProbEntropy.apply(hidden, weight, targets, temperature, chunk, group)
    assert isinstance(result, Tensor)
    return result


class LogProbHead(ColumnParallelLinear):
    """The vocabulary head: megatron-core's output layer, returning log-probs and entropies instead of logits.

    It is a module that owns the weight, because DDP's overlapped parameter gather waits in the owner's forward hook.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor | None, rows: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> Tensor:
        """hidden [t, 1, H] ([t/tp, 1, H] under sequence parallelism) -> [2, n] for the tokens `rows` [n]."""
        if weight is None:
            weight = self.weight
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        chosen = hidden.squeeze(1).index_select(0, rows)
        return log_prob_entropy(
            chosen, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens, group=self.tp_group
        )
