"""Log-prob and entropy of chosen tokens over a vocabulary split across tensor-parallel ranks, in chunks.

The head's logits are the largest tensor of a training step (16,384 tokens x 151,936 words x 4 bytes = 10 GB).
Here they exist for one chunk of tokens at a time, in the forward pass and again in the backward pass, which
computes them anew. The gradient of the weight, as large as the weight twice over, is added where it belongs: to the fp32
gradient buffer of megatron-core's DDP. Shapes: n predicted tokens, H hidden size, V/tp words of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

# A chunk is never made smaller than this many logits (64 MB in fp32): a small vocabulary gains nothing by it.
_MIN_CHUNK_LOGITS = 1 << 24
# Words of the weight whose low-precision gradient of a chunk is made at a time, before it is added in fp32.
_GRADIENT_WORDS = 1 << 14


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
            e = z.exp()
            sums = torch.stack([e.sum(-1), torch.linalg.vecdot(e, z), target_z])
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_sums[rows] = log_sum + largest
            out[0, rows] = sums[2] - log_sum
            out[1, rows] = log_sum - sums[1] / sums[0]
            if chunk >= hidden.size(0) and ctx.needs_input_grad[0]:
                kept = z.sub_(
                    log_sum[:, None]
                )  # everything fits in one chunk: keep it, compute nothing twice
        ctx.save_for_backward(
            hidden, weight, local, mine, log_sums, out[1], *([] if kept is None else [kept])
        )
        ctx.temperature, ctx.chunk = temperature, chunk
        # DDP's gradient buffer hangs on the parameter.
        ctx.parameter = weight if getattr(weight, "main_grad", None) is not None else None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
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
            # In place where nothing else needs log_p: this is the largest tensor there is.
            p = log_p.exp() if kept or use_entropy else log_p.exp_()
            if use_entropy:
                log_p = log_p + entropy[rows, None] if kept else log_p.add_(entropy[rows, None])
                grad_z = p.mul_(log_p.mul_(by_entropy[rows, None]).add_(by_logprob[rows, None])).neg_()
            else:
                grad_z = p.mul_(-by_logprob[rows, None])
            grad_z.scatter_add_(-1, local[rows, None], (by_logprob[rows] * mine[rows])[:, None])
            if ctx.temperature != 1.0:
                grad_z.div_(ctx.temperature)
            grad_logits = grad_z.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            _add_outer(grad_weight, grad_logits, hidden[rows])
            del log_p, p, grad_z, grad_logits
        if parameter is None:
            return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
        # DDP waits for a gradient, and adds it only where this says that nothing was added, or where an embedding shares
        # the weight: its gradient comes added to ours.
        parameter.grad_added_to_main_grad = True
        shared = getattr(parameter, "zero_out_wgrad", False)
        placeholder = torch.zeros_like(weight) if shared else torch.empty_like(weight)
        return grad_hidden, placeholder, None, None, None, None


def _add_outer(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """total [V/tp, H] += grad_logits^T hidden, in the precision of `total`."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
        return
    for start in range(0, total.size(0), _GRADIENT_WORDS):
        words = slice(start, start + _GRADIENT_WORDS)
        total[words].add_(torch.mm(grad_logits[:, words].t(), hidden))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """fp32 logits over temperature, [n, V/tp]; a fresh tensor that the caller may overwrite."""
    logits = torch.mm(hidden, weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def log_prob_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk_tokens: int, group: Any
) -> Tensor:
    """Log-probs (row 0) and entropies (row 1), fp32 [2, n], equal on every tensor-parallel rank.

    hidden [n, H] is the same on all ranks of `group`, weight [V/tp, H] is this rank's rows, targets [n] are
    global token ids. The gradient of hidden is this rank's part: the caller reduces it over the group.
    """
    chunk = max(chunk_tokens, _MIN_CHUNK_LOGITS // weight.size(0), 1)
    result = _LogProbEntropy.apply(hidden, weight, targets, temperature, chunk, group)
    assert isinstance(result, Tensor)
    return result


class LogProbHead(ColumnParallelLinear):
    """The vocabulary head: megatron-core's output layer, but it answers log-probs instead of logits.

    Being the module that owns the weight, it is where DDP's overlapped parameter gather waits for it.
    """

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        weight: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
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
