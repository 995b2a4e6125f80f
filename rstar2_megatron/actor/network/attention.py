"""Rotary embedding and packed attention of the local layer spec, which runs without TransformerEngine on CPU and GPU.

`PackedBatch` holds the indices of a micro-batch. They are computed once and passed to every layer, also through activation
recompute and pipeline stages.

Shapes: t tokens of this rank's micro-batch, n segments (trajectories), L longest segment, h heads and g KV
heads of this rank, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rstar2_megatron.model.model_config import ModelConfig


@dataclass
class PackedBatch(PackedSeqParams):
    """Positions of the segments in a micro-batch, for `PackedAttention`.

    `qkv_format` is "sbhd" although segments are packed. megatron-core then passes [t, 1, ...] tensors to the layers, and
    PackedAttention handles rotary embeddings and segments. Otherwise every layer would loop over the segments.
    """

    cos: Tensor | None = None  # [t, 1, 1, d/2], in the compute dtype
    sin: Tensor | None = None
    lengths: tuple[int, ...] = ()  # segment lengths, summed over CP ranks
    slot_token: Tensor | None = None  # [n * L] token in each padded slot (0 where none); None: no padding
    token_slot: Tensor | None = None  # [t] padded slot of each token
    context_mask: Tensor | None = None  # [t, t * cp] True where a query sees a key (CP only)


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """Angle per position [d/2] of each pair of dimensions, fp32.

    With Llama 3's scaling, pairs whose wave is longer than original length / low_freq_factor turn `factor` times slower,
    those shorter than original length / high_freq_factor as before, those between by a linear mix over
    original length / wave length.
    """
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
    plain = 1.0 / model.rope_theta**exponent
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    waves = plain * (scaling.original_max_position_embeddings / (2 * math.pi))  # in the original length
    share = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain / scaling.factor, plain, share.clamp(0.0, 1.0))


def rotary_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [t, 1, 1, d/2] of the rotary angles at `positions` [t] by `frequencies` [d/2], computed in fp32."""
    angles = positions.float()[:, None] * frequencies.to(positions.device)
    shape = (-1, 1, 1, frequencies.numel())
    return angles.cos().view(shape).to(dtype), angles.sin().view(shape).to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotary embedding that pairs the two halves of a head. The backward pass rotates the gradient by the negative angle."""

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
    """Select rows of x by `index`; the backward pass selects rows of the gradient by `inverse`.

    This is correct when each row of x goes to exactly one row without padding and padded rows get zero gradient, as causal
    attention gives them. It is about five times faster on CPU than index_add.
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
    """Select the tokens from the padded slots. Slots without a token get zero gradient."""

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

    On CPU, and in fp32, the segments form one padded [n, L] batch for a single call. It needs no padding mask: padded keys
    come after every real query, so the causal mask excludes them. On CUDA in low precision torch's varlen kernel reads the
    packed segments. With context parallelism keys and values are gathered over the CP ranks and masked by position.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any) -> None:
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
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and batch.cu_seqlens_q is not None:
            return self._varlen(query, key, value, batch)
        query, key, value = (self._as_batch(x.squeeze(1), segments, batch) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.size(1) != key.size(1)
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
        from torch.nn.attention.varlen import varlen_attn  # imported here, because it needs a CUDA build of torch

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
        key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (key, value))
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [1, heads, t, d]
        if query.is_cuda:  # torch's memory-efficient kernel with a mask does not support grouped heads
            copies = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.softmax_scale, enable_gqa=query.size(1) != key.size(1)
        )
        return out.permute(2, 0, 1, 3).reshape(tokens, 1, -1)
