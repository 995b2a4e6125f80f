"""What TransformerEngine 2.11's compiled extension and its Triton kernels compute, in torch on a CPU.

Signatures are those that its Python calls. Products are computed in fp32 and rounded once, as tensor cores do. `CALLS` counts
the calls, so that a test can tell that a path was taken.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()
DTYPES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}


class DType:
    """A member of the extension's enum of dtypes."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def torch(self) -> torch.dtype:
        return DTYPES[self.name]


def _counted(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[kernel.__name__] += 1
        return kernel(*args, **kwargs)

    return call


# ------------------------------------------------------------------------------------------------------- products


def _product(weight: Tensor, weight_t: bool, other: Tensor, other_t: bool) -> Tensor:
    """The column-major product of cuBLAS, seen in rows: op(other) @ op(weight) in fp32."""
    left = other.reshape(-1, other.shape[-1])
    right = weight.reshape(-1, weight.shape[-1])
    return (left.t() if other_t else left).float() @ (right.t() if weight_t else right).float()


def _put(target: Tensor, value: Tensor, accumulate: bool) -> None:
    view = target.view(value.shape)
    if accumulate:
        view.add_(value.to(target.dtype))
    else:
        view.copy_(value)


@_counted
def generic_gemm(
    a: Tensor,
    a_t: bool,
    b: Tensor,
    b_t: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: DType | None,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, Any]:
    """(product, bias gradient, None, extra output)."""
    assert quantizer is None and not gelu and overlap.get("comm_overlap") is None
    product, bias_grad = _product(a, a_t, b, b_t), None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.reshape(-1, b.shape[-1]).float().sum(0).to(bias.dtype)
        else:
            product += bias.float()
    if out is not None:
        _put(out, product, accumulate)
        return out, bias_grad, None, overlap.get("extra_output")
    result = product.to(a.dtype if out_dtype is None else out_dtype.torch)
    if not b_t:
        result = result.view(*b.shape[:-1], result.shape[-1])
    return result, bias_grad, None, overlap.get("extra_output")


@_counted
def te_general_grouped_gemm(
    a: Sequence[Tensor],
    a_t: bool,
    b: Sequence[Tensor],
    b_t: bool,
    out: Sequence[Tensor],
    out_dtype: DType,
    m_splits: Sequence[int],
    bias: Any,
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    split_accumulator: bool,
    num_sms: int,
) -> Any:
    """A product for each expert; with `single_output` its results lie one after another in `out[0]`."""
    outputs = list(torch.split(out[0], list(m_splits))) if single_output else list(out)
    for weight, rows, target in zip(a, b, outputs, strict=True):
        if target.numel():
            _put(target, _product(weight, a_t, rows, b_t), accumulate)
    return bias


def mm_with_dtype(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.mm with `out_dtype`, which torch has on CUDA only."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return plain(a, b, **kwargs) if out_dtype is None else plain(a.float(), b.float()).to(out_dtype)

    return mm


def addmm_with_dtype(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.addmm with `out_dtype`, likewise."""

    def addmm(
        base: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if out_dtype is None:
            return plain(base, a, b, **kwargs) if out is None else plain(base, a, b, out=out, **kwargs)
        result = (base + a.float() @ b.float()).to(out_dtype)
        return result if out is None else out.copy_(result)

    return addmm


# ------------------------------------------------------------------------------------------------------ normalisation


@_counted
def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: DType, sms: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    """(y, None, 1 / root mean square of each row)."""
    assert quantizer is None and not zero_centered
    scale = (x.float().square().mean(-1) + eps).rsqrt()
    y = (x.float() * scale[:, None] * weight.float()).to(dtype.torch)
    return (y if out is None else out.copy_(y)), None, scale


@_counted
def rmsnorm_bwd(dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, sms: int, zero_centered: bool) -> tuple[Tensor, Tensor]:
    normed, upstream = x.float() * scale[:, None], dy.float()
    scaled = upstream * weight.float()
    dx = scale[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (upstream * normed).sum(0).to(weight.dtype)


# ------------------------------------------------------------------------------------------------------ attention


def _rotated(t: Tensor, angles: Tensor, ends: Tensor, direction: float) -> Tensor:
    """t: [tokens, heads, size] of sequences that end at `ends`; angles: [positions, 1, 1, size]."""
    positions = torch.cat([torch.arange(int(n)) for n in ends.diff()])
    half = t.shape[-1] // 2
    cos, sin = angles[positions, 0].cos(), angles[positions, 0].sin() * direction
    turned = torch.cat((-t[..., half:], t[..., :half]), -1).float()
    return (t.float() * cos + turned * sin).to(t.dtype)


@_counted
def fused_rope_forward(
    t: Tensor, angles: Tensor, start: Any, layout: Any, interleaved: bool, ends: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    assert cp_size == 1 and not interleaved
    return _rotated(t, angles, ends, 1.0)


@_counted
def fused_rope_backward(
    grad: Tensor, angles: Tensor, start: Any, layout: Any, interleaved: bool, ends: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    return _rotated(grad, angles, ends, -1.0)


def _attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Causal attention inside each sequence, fp32. q: [tokens, heads, size]; k, v: [tokens, groups, size]."""
    repeats = q.shape[1] // k.shape[1]
    parts = []
    for start, end in itertools.pairwise(ends.tolist()):
        query, key, value = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
        key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(1, 2) * scale).masked_fill(future, float("-inf"))
        parts.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(parts)


@_counted
def fused_attn_fwd(
    max_q: int, max_kv: int, training: bool, scale: float, dropout: float, fast: bool, layout: Any, bias_type: Any,
    mask_type: Any, softmax_type: Any, window: Any, ends: Tensor, ends_kv: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """[output, log-sum-exp and random state, which the backward kernel here does not use]."""
    assert not dropout and torch.equal(ends, ends_kv)
    with torch.no_grad():
        out = _attention(q, k, v, ends, scale).to(q.dtype)
    return [out, torch.zeros(*q.shape[:2], 1), torch.zeros(2, dtype=torch.int64)]


@_counted
def fused_attn_bwd(
    max_q: int, max_kv: int, scale: float, dropout: float, fast: bool, layout: Any, bias_type: Any, mask_type: Any,
    softmax_type: Any, window: Any, deterministic: bool, ends: Tensor, ends_kv: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, grad: Tensor, *rest: Any,
) -> list[Tensor | None]:  # fmt: skip
    with torch.enable_grad():
        inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
        gradients = torch.autograd.grad(_attention(*inputs, ends, scale), inputs, grad.float())
    return [*(g.to(q.dtype) for g in gradients), None, None]


# ------------------------------------------------------------------------------------------------------ optimizer


@_counted
def multi_tensor_adam(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], lr: float, beta1: float, beta2: float, eps: float,
    step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """AdamW in place; lists: gradients, parameters, first and second moments."""
    assert mode == 1, "AdamW"
    first, second = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    for gradient, parameter, mean, square in zip(*lists, strict=True):
        g = gradient.float()
        mean.mul_(beta1).add_(g, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (mean / first) / ((square / second).sqrt() + eps)
        parameter.sub_(lr * (update + weight_decay * parameter))


@_counted
def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False) -> Any:
    total = torch.stack([x.float().square().sum() for x in lists[0]]).sum()
    return total.sqrt(), torch.zeros(1)


@_counted
def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


# -------------------------------------------------------------------------------------- experts (Triton in the original)


@_counted
def make_row_id_map(routing: Tensor, tokens: int, experts: int) -> Tensor:
    """[tokens, 2 experts + 1]: for each expert the row of a token in the permuted order or -1; last the number of experts."""
    chosen = routing.bool()
    by_expert = chosen.t().reshape(-1)
    rows = (by_expert.long().cumsum(0) - 1).masked_fill(~by_expert, -1)
    result = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int64)
    result[:, :experts] = rows.view(experts, tokens).t()
    result[:, -1] = chosen.sum(1)
    return result


def _pairs(row_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, experts, permuted rows) of every choice."""
    token, expert = torch.nonzero(row_ids[:, :experts] >= 0, as_tuple=True)
    return token, expert, row_ids[token, expert]


@_counted
def permute_with_mask_map(
    x: Tensor, row_ids: Tensor, probs: Tensor | None, scale: Any, tokens: int, experts: int, rows: int, hidden: int, more: int
) -> tuple[Tensor, None, Tensor | None]:
    token, expert, row = _pairs(row_ids, experts)
    assert len(row) == rows
    permuted = torch.empty(rows, hidden, dtype=x.dtype).index_copy_(0, row, x[token])
    if probs is None:
        return permuted, None, None
    return permuted, None, torch.empty(rows, dtype=probs.dtype).index_copy_(0, row, probs[token, expert])


@_counted
def unpermute_with_mask_map(
    x: Tensor, row_ids: Tensor, merging: Any, probs: Tensor | None, tokens: int, experts: int, hidden: int
) -> tuple[Tensor, Tensor | None]:
    assert merging is None
    token, expert, row = _pairs(row_ids, experts)
    result = torch.zeros(tokens, hidden).index_add_(0, token, x[row].float()).to(x.dtype)
    if probs is None:
        return result, None
    spread = torch.zeros(tokens, experts, dtype=probs.dtype)
    spread[token, expert] = probs[row]
    return result, spread


@_counted
def make_chunk_sort_map(sizes: Tensor, order: Tensor, tokens: int, chunks: int) -> Tensor:
    """[tokens]: the place of each row when the chunks stand in another order."""
    starts = [0, *itertools.accumulate(sizes.tolist())]
    places = torch.empty(tokens, dtype=torch.int64)
    at = 0
    for chunk in order.tolist():
        size = starts[chunk + 1] - starts[chunk]
        places[starts[chunk] : starts[chunk + 1]] = torch.arange(at, at + size)
        at += size
    return places


@_counted
def sort_chunks_by_map(
    x: Tensor, places: Tensor, probs: Tensor | None, tokens: int, hidden: int, is_forward: bool = True
) -> tuple[Tensor, Tensor | None]:
    def move(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor).index_copy_(0, places, tensor) if is_forward else tensor[places]

    return move(x), None if probs is None else move(probs)


EXTENSION = (
    generic_gemm,
    te_general_grouped_gemm,
    rmsnorm_fwd,
    rmsnorm_bwd,
    fused_rope_forward,
    fused_rope_backward,
    fused_attn_fwd,
    fused_attn_bwd,
    multi_tensor_adam,
    multi_tensor_l2norm,
    multi_tensor_scale,
)
"""Functions of `transformer_engine_torch`."""
TRITON = (make_row_id_map, permute_with_mask_map, unpermute_with_mask_map, make_chunk_sort_map, sort_chunks_by_map)
"""Functions of `transformer_engine.pytorch.triton.permutation`."""
