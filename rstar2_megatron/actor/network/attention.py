"""The parts of a transformer layer that run without TransformerEngine, on CPU and GPU.

They plug into megatron-core's layer spec (`layer_spec.py`). `PackedBatch` travels with a micro-batch through
every layer, also through activation recompute and pipeline stages, and holds all index arithmetic, done once.

Shapes: t tokens of this rank's micro-batch, n segments (trajectories), L longest segment, h heads and g KV
heads of this rank, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


@dataclass
class PackedBatch(PackedSeqParams):
    """Where the segments of a micro-batch lie, for `PackedAttention`.

    `qkv_format` stays "sbhd": megatron-core then hands the layers [t, 1, ...] tensors and leaves rotary
    embeddings and segments to the core attention, instead of looping over the segments in every layer.
    """

    cos: Tensor | None = None  # [t, 1, 1, d/2], in the compute dtype
    sin: Tensor | None = None
    lengths: tuple[int, ...] = ()  # segment lengths, summed over CP ranks
    slot_token: Tensor | None = None  # [n * L] token in each padded slot (0 where none); None: no padding
    token_slot: Tensor | None = None  # [t] padded slot of each token
    context_mask: Tensor | None = None  # [t, t * cp] True where a query sees a key (CP only)


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [t, 1, 1, d/2] of the rotary angles at `positions` [t], computed in fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[:, None] * (1.0 / theta**exponent)
    shape = (-1, 1, 1, head_dim // 2)
    return angles.cos().view(shape).to(dtype), angles.sin().view(shape).to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotary embedding (the two halves of a head form the pairs); its gradient is the opposite rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (x1, x2), (out1, out2) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    return out


class _Rearrange(torch.autograd.Function):
    """Rows of x by `index`; the gradient's rows by `inverse`.

    Right where each row of x goes to exactly one row that counts: the padded rows must get zero gradient,
    which causal attention gives them. About five times faster on CPU than scattering with index_add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _ScatterBack(torch.autograd.Function):
    """Tokens out of padded slots; the gradient of slots without a token is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_slot)
        ctx.slots = x.size(0)
        return x.index_select(0, token_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (token_slot,) = ctx.saved_tensors
        out = grads[0].new_zeros((ctx.slots, *grads[0].shape[1:]))
        return out.index_copy_(0, token_slot, grads[0]), None


class PackedAttention(MegatronModule):
    """Rotary embedding and causal grouped-query attention over packed segments, by torch's fused kernels.

    Segments are laid out as one [n, L] batch and attended to in a single call: causality alone keeps padding
    out, because padded keys come after every real query. With context parallelism keys and values are
    gathered over the CP ranks and masked by position.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any
    ) -> None:
        super().__init__(config)
        self.softmax_scale: float | None = kwargs.get("softmax_scale")
        collection = kwargs.get("pg_collection")
        if collection is None:
            raise ValueError("PackedAttention needs megatron-core's process groups (pg_collection)")
        self.cp_group = collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [t, 1, h, d], key and value [t, 1, g, d] -> [t, 1, h * d]."""
        batch = packed_seq_params
        assert isinstance(batch, PackedBatch) and batch.cos is not None and batch.sin is not None
        query = _Rotate.apply(query, batch.cos, batch.sin)
        key = _Rotate.apply(key, batch.cos, batch.sin)
        if batch.context_mask is not None:
            return self._across_context(query, key, value, batch.context_mask)
        tokens, segments = query.size(0), len(batch.lengths)
        if (
            query.is_cuda
            and query.dtype in (torch.bfloat16, torch.float16)
            and batch.cu_seqlens_q is not None
        ):
            return self._varlen(query, key, value, batch)
        query, key, value = (self._as_batch(x.squeeze(1), segments, batch) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        out = out.transpose(1, 2).flatten(0, 1).flatten(1)  # [n * L, h * d]
        if batch.token_slot is not None:
            out = _ScatterBack.apply(out, batch.token_slot)
        return out.view(tokens, 1, -1)

    @staticmethod
    def _as_batch(x: Tensor, segments: int, batch: PackedBatch) -> Tensor:
        """[t, heads, d] -> [n, heads, L, d]."""
        if batch.slot_token is not None:
            x = _Rearrange.apply(x, batch.slot_token, batch.token_slot)
        return x.view(segments, -1, *x.shape[1:]).transpose(1, 2)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, batch: PackedBatch) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # here: it needs a GPU build of torch

        longest = batch.max_seqlen_q
        out = varlen_attn(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            batch.cu_seqlens_q,
            batch.cu_seqlens_q,
            longest,
            longest,
            scale=self.softmax_scale,
            window_size=(-1, 0),
            enable_gqa=query.size(2) != key.size(2),
        )
        assert isinstance(out, Tensor)
        return out.reshape(query.size(0), 1, -1)

    def _across_context(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        tokens = query.size(0)
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (key, value)
        )
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [1, heads, t, d]
        if query.is_cuda:  # torch's kernel that takes a mask and stores no scores knows no grouped heads
            copies = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.permute(2, 0, 1, 3).reshape(tokens, 1, -1)
