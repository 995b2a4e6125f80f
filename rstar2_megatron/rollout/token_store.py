"""Keeps the per-token arrays of ended trajectories beside their engine, until the driver says which are trained on.

Grading, resampling and metrics need texts and lengths only, so tokens travel neither through the reward workers nor through
the driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from rstar2_megatron.algorithm.batch import TokenBlock, train_sequence
from rstar2_megatron.trajectory import HeldTokens, Trajectory

_ARRAYS = tuple(Trajectory.ARRAYS)


class TokenStore:
    """The tokens that the rollout worker of rank `worker` holds."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._numbers = itertools.count()
        self._kept: dict[int, Trajectory] = {}

    def keep(self, trajectory: Trajectory) -> None:
        """Move the tokens of an ended trajectory here and leave their figures. Raises ValueError for unequal arrays."""
        trajectory.check()
        number = next(self._numbers)
        t = trajectory
        figures = t.prompt_tokens, t.response_tokens, t.spans, t.logprob_sum, t.logprob_min, t.num_improbable
        held = HeldTokens(self._worker, number, *figures)
        kept = Trajectory(trajectory.query_id, trajectory.rollout_index, finish_reason=trajectory.finish_reason)
        for name, empty in zip(_ARRAYS, [getattr(kept, name) for name in _ARRAYS], strict=True):
            setattr(kept, name, getattr(trajectory, name).copy())  # Ray's memory, if it came from another process
            setattr(trajectory, name, empty)
        self._kept[number] = kept
        trajectory.held = held

    def tokens(self, numbers: Sequence[int]) -> list[Trajectory]:
        """Trajectories with nothing but the tokens of `numbers`."""
        return [self._kept[number] for number in numbers]

    def block(self, numbers: Sequence[int]) -> TokenBlock:
        """The training sequences of `numbers`. Raises ValueError for a trajectory that cannot be trained on."""
        return TokenBlock.of([train_sequence(self._kept[number]) for number in numbers])

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)


def give_back(trajectory: Trajectory, tokens: Trajectory) -> None:
    """Undo `TokenStore.keep`."""
    for name in _ARRAYS:
        setattr(trajectory, name, getattr(tokens, name))
    trajectory.held = None
