"""Appends tokens to a trajectory in amortised constant time a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rstar2_megatron.trajectory import Trajectory

_FIRST_ROOM = 1024  # tokens


class TokenBuffer:
    """Arrays with room at the end; the trajectory's per-token arrays are views of their filled part."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self._used = len(trajectory.response_ids)
        self._arrays = [trajectory.response_ids, trajectory.loss_mask, trajectory.rollout_logprobs]

    def append(self, ids: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray | None) -> None:
        """Append generated tokens with their log-probs, or tool text, which has none.

        Raises ValueError when `ids` and `logprobs` differ in length.
        """
        if logprobs is not None and len(ids) != len(logprobs):
            raise ValueError(f"the engine answered with {len(ids)} token ids and {len(logprobs)} log-probs")
        if not len(ids):  # nothing to write into arrays that have no room yet, and that Ray may have made read-only
            return
        start, end = self._used, self._used + len(ids)
        if end > len(self._arrays[0]):
            room = max(_FIRST_ROOM, 2 * end)
            self._arrays = [np.concatenate([a[:start], np.empty(room - start, a.dtype)]) for a in self._arrays]
        values = ids, int(logprobs is not None), 0.0 if logprobs is None else logprobs
        for array, value in zip(self._arrays, values, strict=True):
            array[start:end] = value
        self._used = end
        t = self._trajectory
        t.response_ids, t.loss_mask, t.rollout_logprobs = (array[:end] for array in self._arrays)
