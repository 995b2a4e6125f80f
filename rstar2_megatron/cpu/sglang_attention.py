"""Batched attention for SGLang's `torch_native` backend, which otherwise loops over requests in Python.

Each layer calls scaled_dot_product_attention once for the whole padded batch. Indices and masks are computed once per
forward pass. Decoding reads a dense copy of the KV cache (`dense_kv`). SGLang's loop is used for sliding windows,
encoder-decoder models, and prefill batches so ragged that padding costs more than it saves.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rstar2_megatron.cpu.dense_kv import DenseKV

_MAX_PADDING_FACTOR = 4  # largest ratio of padded to real work of a prefill batch
_SMALL_WORK = 65536  # query x key pairs below which padding does not matter
_DENSE_BYTES = 1 << 30  # memory for the dense copy of running requests, all layers


class BatchedTorchAttention(TorchNativeAttnBackend):
    """Shapes: B requests, L longest sequence, Q longest new part, H query heads, K KV heads, D head size."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._dense = DenseKV(_DENSE_BYTES)
        pool = model_runner.token_to_kv_pool
        keys, values = pool.get_key_buffer(0), pool.get_value_buffer(0)
        per_layer = keys[0].numel() * keys.element_size() + values[0].numel() * values.element_size()
        self._bytes_per_token = per_layer * model_runner.model_config.num_hidden_layers

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._rows: Tensor | None = None  # [B, L] KV slots; padding points to slot 0, SGLang's own padding slot
        self._mask: Tensor | None = None
        self._query_index: Tensor | None = None  # [B, Q] rows of the flat query; None while decoding
        lengths = forward_batch.seq_lens.to(torch.int64)
        if lengths.numel() == 0:
            return
        longest = int(lengths.max())
        valid_key = torch.arange(longest)[None, :] < lengths[:, None]
        table = self.req_to_token_pool.req_to_token
        rows = table[forward_batch.req_pool_indices, :longest].to(torch.int64)
        rows = torch.where(valid_key, rows, 0)
        requests = forward_batch.req_pool_indices.tolist()
        self._decode_dense = False
        if forward_batch.forward_mode.is_decode():
            self._rows, self._mask = rows, valid_key[:, None, None, :]
            self._decode_dense = self._dense.begin(requests, lengths.tolist(), rows, self._bytes_per_token)
            return
        self._dense.invalidate(requests)
        new = forward_batch.extend_seq_lens.to(torch.int64)
        cached = forward_batch.extend_prefix_lens.to(torch.int64)
        longest_new = int(new.max())
        padded_work = lengths.numel() * longest_new * longest
        if padded_work > _MAX_PADDING_FACTOR * int((new * lengths).sum()) + _SMALL_WORK:
            return
        offset = torch.arange(longest_new)[None, :]
        self._valid_query = offset < new[:, None]
        first = torch.cumsum(new, 0) - new
        self._query_index = torch.where(self._valid_query, first[:, None] + offset, 0)
        position = cached[:, None] + offset
        causal = torch.arange(longest)[None, None, :] <= position[:, :, None]
        self._rows, self._mask = rows, (causal & valid_key[:, None, :])[:, None]

    def _keys(self, cache: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[slots, K, D] -> [B, K, L, D]"""
        return cache[rows].transpose(1, 2).to(dtype)

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        encoder_lengths = args[3] if len(args) > 3 else kwargs.get("encoder_lens")
        window = kwargs.get("sliding_window_size")
        if self._rows is None or encoder_lengths is not None or (window is not None and window > -1):
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **kwargs)
        batch, heads, size = query.shape
        kv_heads = k_cache.shape[1]
        # Query heads that share a KV head become its query rows, so K and V are not repeated.
        grouped = query.view(batch, kv_heads, heads // kv_heads, size)
        scale = kwargs.get("scaling")
        if self._decode_dense and k_cache.dtype == query.dtype:
            k, v = self._dense.layer(k_cache, v_cache)
            by_row = grouped.new_zeros((k.shape[0], *grouped.shape[1:]))
            by_row[self._dense.rows] = grouped
            out = scaled_dot_product_attention(by_row, k, v, attn_mask=self._dense.mask, scale=scale)
            out = out[self._dense.rows]
        else:
            k = self._keys(k_cache, self._rows, query.dtype)
            v = self._keys(v_cache, self._rows, query.dtype)
            out = scaled_dot_product_attention(grouped, k, v, attn_mask=self._mask, scale=scale)
        output.copy_(out.reshape(batch, heads, -1))
        return output

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        window = kwargs.get("sliding_window_size")
        plain = kwargs.get("causal", False) and not kwargs.get("is_cross_attn", False)
        if self._query_index is None or not plain or (window is not None and window > -1):
            return super()._run_sdpa_forward_extend(query, output, k_cache, v_cache, *args, **kwargs)
        assert self._rows is not None
        k = self._keys(k_cache, self._rows, query.dtype)
        v = self._keys(v_cache, self._rows, query.dtype)
        q = query[self._query_index].transpose(1, 2)  # [B, H, Q, D]
        gqa = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, scale=kwargs.get("scaling"), enable_gqa=gqa
        ).transpose(1, 2)
        output[self._query_index[self._valid_query]] = out[self._valid_query].to(output.dtype)
        return output


def install() -> None:
    """Replace SGLang's `torch_native` backend by the batched one in this process."""
    attention_registry.ATTENTION_BACKENDS["torch_native"] = BatchedTorchAttention
    # Seeded sampling turns on batch-invariant triton kernels, which do not exist on a CPU and are not needed there.
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None
