"""A dense copy of the running requests' KV cache, so that CPU decoding needs no gather.

SGLang stores KV in a pool of token slots. Every decode step would gather a request's slots for each layer before attention
(3 GB/s on a CPU core, where attention itself reads 17 GB/s). Here each running request owns a row of [rows, K, L, D] per
layer, filled once after its prefill and extended by one token a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIN_LENGTH = 256  # initial tokens of a row; grows by doubling
_MAX_HOLES = 0.25  # share of rows without a request before the rows are compacted


class DenseKV:
    """Rows for requests, identified by SGLang's `req_pool_idx`. Each step calls `begin` once, then `layer` per layer.

    K KV heads, D head size, R rows (requests running now or recently), B requests of the step.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._row: dict[int, int] = {}  # req_pool_idx -> row
        self._free: list[int] = []
        self._num_rows = 0
        self._length = 0
        self._filled: dict[int, int] = {}  # req_pool_idx -> tokens present in its row
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # by address of the layer's K pool

    def invalidate(self, requests: list[int]) -> None:
        """Mark rows for refilling: their requests were prefilled, or their pool index belongs to a new request."""
        for request in requests:
            self._filled.pop(request, None)

    def begin(self, requests: list[int], lengths: list[int], slots: Tensor, bytes_per_token: int) -> bool:
        """Assign rows to the step's requests. `slots` [B, max(lengths)] are their pool slots.

        Returns False, without a change, when the rows would take more than `max_bytes`.
        """
        longest = max(lengths)
        length = max(self._length, _MIN_LENGTH)
        while length < longest:
            length *= 2
        if len(requests) * length * bytes_per_token > self._max_bytes:
            self._drop()
            return False
        self._leave(set(requests))
        self._enter(requests)
        if length != self._length:
            self._drop_storage()
            self._length = length
        if len(self._free) > _MAX_HOLES * self._num_rows:
            self._drop_storage()
            self._row = {request: row for row, request in enumerate(requests)}
            self._free, self._num_rows = [], len(requests)
        self.rows = torch.tensor([self._row[request] for request in requests])
        stale = [i for i, request in enumerate(requests) if self._filled.get(request) != lengths[i] - 1]
        self._last = torch.tensor(lengths) - 1
        self._last_slots = slots.gather(1, self._last[:, None]).squeeze(1)
        self._stale_slots = [(requests[i], slots[i, : lengths[i]]) for i in stale]
        for request, tokens in zip(requests, lengths):
            self._filled[request] = tokens
        row_length = torch.ones(self._num_rows, dtype=torch.int64)
        row_length[self.rows] = self._last + 1
        self.longest = longest
        self.mask = (torch.arange(longest)[None, :] < row_length[:, None])[:, None, None, :]
        return True

    def _leave(self, staying: set[int]) -> None:
        for request in [request for request in self._row if request not in staying]:
            self._free.append(self._row.pop(request))
            self._filled.pop(request, None)

    def _enter(self, requests: list[int]) -> None:
        for request in requests:
            if request not in self._row:
                if not self._free:
                    self._free.append(self._num_rows)
                    self._num_rows += 1
                self._row[request] = self._free.pop()

    def _drop_storage(self) -> None:
        self._layers.clear()
        self._filled.clear()

    def _drop(self) -> None:
        self._drop_storage()
        self._row.clear()
        self._free.clear()
        self._num_rows = self._length = 0

    def layer(self, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, K, longest, D] of one layer, including the step's new tokens."""
        stored = self._layers.get(k_pool.data_ptr())
        if stored is None or stored[0].shape[0] < self._num_rows:
            stored = self._grow(stored, k_pool, v_pool)
            self._layers[k_pool.data_ptr()] = stored
        for dense, pool in zip(stored, (k_pool, v_pool)):
            dense[self.rows, :, self._last] = pool[self._last_slots]
            for request, slots in self._stale_slots:
                dense[self._row[request], :, : slots.numel()] = pool[slots].transpose(0, 1)
        return stored[0][: self._num_rows, :, : self.longest], stored[1][: self._num_rows, :, : self.longest]

    def _grow(self, old: tuple[Tensor, Tensor] | None, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        # Rows grow by half, so that requests that join one by one do not each copy everything.
        rows = self._num_rows if old is None else max(self._num_rows, old[0].shape[0] * 3 // 2)
        new = []
        for i, pool in enumerate((k_pool, v_pool)):
            # zeros, because attention multiplies unfilled rows by weight 0, and 0 * NaN is NaN
            dense = pool.new_zeros((rows, pool.shape[1], self._length, pool.shape[2]))
            if old is not None:
                dense[: old[i].shape[0]] = old[i]
            new.append(dense)
        return new[0], new[1]
