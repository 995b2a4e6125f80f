"""Moves training sequences from the rollout workers, or from the driver, to the actor's ranks through Ray's object store.

A batch is put once, as one block for each worker that generated a part of it. The driver holds references; every rank
maps the blocks of its node into its memory and reads the sequences that it trains on.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import ray

from rstar2_megatron.algorithm.batch import TokenBlock, TrainBatch, TrainSequence, train_sequence
from rstar2_megatron.cluster.calls import PendingCall, WorkerGroup, WorkerLost
from rstar2_megatron.rollout.phase import OpenGroup, drop_held
from rstar2_megatron.rollout.token_store import give_back
from rstar2_megatron.trajectory import Group, Trajectory

_READ_TIMEOUT_S = 600.0  # of a batch from another node


class BatchLost(RuntimeError):
    """Blocks of a batch are no longer in the object store."""


def put_block(block: TokenBlock) -> tuple[list[Any], int]:
    """Put a block into the object store: (its reference in a list, which Ray does not resolve, its trained tokens)."""
    return [ray.put(block)], block.trained_tokens


def put_sequences(sequences: Sequence[TrainSequence]) -> TrainBatch:
    """A batch of sequences that are in this process."""
    count = len(sequences)
    blocks, trained = put_block(TokenBlock.of(sequences))
    advantages = np.array([s.advantage for s in sequences])
    return TrainBatch(blocks, np.zeros(count, np.int32), np.arange(count), advantages, trained)


def read_batch(batch: TrainBatch) -> list[TrainSequence]:
    """The sequences of a batch, as views of the object store. Raises BatchLost."""
    try:
        return batch.sequences(ray.get(batch.blocks, timeout=_READ_TIMEOUT_S))
    except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
        raise BatchLost(
            f"tokens of the batch ({len(batch)} sequences in {len(batch.blocks)} blocks) cannot be read: the rollout worker "
            f"that put them has died, or its node is gone ({type(error).__name__}: {error})"
        ) from error


class TokenSource:
    """The tokens that the rollout workers hold after a phase (`rollout.token_store`), until the next one begins."""

    def __init__(self, rollout: WorkerGroup, timeout_s: float) -> None:
        self._rollout = rollout
        self._timeout_s = timeout_s

    def fetch(self, trajectories: Iterable[Trajectory]) -> None:
        """Bring the tokens of `trajectories` into this process. Raises WorkerLost."""
        for worker, there, numbers in _by_worker(trajectories):
            (tokens,) = self._rollout.call("tokens", numbers, ranks=[worker], timeout_s=self._timeout_s)
            for trajectory, own in zip(there, tokens, strict=True):
                give_back(trajectory, own)

    def fetch_ended(self, groups: Sequence[OpenGroup]) -> None:
        """Bring the tokens of unfinished groups here. Those that a dead worker held are rolled out again."""
        try:
            self.fetch(t for group in groups for t in group.ended.values())
        except WorkerLost as error:
            for group in groups:
                group.ended = {i: t for i, t in group.ended.items() if not t.held or t.held.worker != error.rank}
            self.fetch_ended(groups)

    def fetch_complete(self, groups: Sequence[Group]) -> None:
        """Bring the tokens of complete groups here. Trajectories that a dead worker held are dropped as INFRASTRUCTURE."""
        try:
            self.fetch(t for group in groups for t in group.trajectories)
        except WorkerLost as error:
            drop_held((t for group in groups for t in group.trajectories), error.rank)
            self.fetch_complete(groups)

    def put_batch(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float] | np.ndarray, done: Iterable[Trajectory]
    ) -> TrainBatch:
        """The batch of `trajectories`; their workers put its tokens. They then forget those of `done`.

        advantages: as `credit.advantages_of`.
        Raises WorkerLost, after which nothing is forgotten, and WorkerFailed for a trajectory that cannot be trained on.
        """
        places: dict[tuple[int, int], tuple[int, int]] = {}  # (worker, number): (block, row)
        blocks: list[Any] = []
        trained = 0
        here = [train_sequence(t) for t in trajectories if not t.held]
        if here:
            blocks, trained = put_block(TokenBlock.of(here))
        calls: list[PendingCall] = []
        for worker, _, numbers in _by_worker(trajectories):
            places |= {(worker, number): (len(calls) + bool(here), row) for row, number in enumerate(numbers)}
            calls.append(self._rollout.start("put_tokens", numbers, ranks=[worker]))
        for call in calls:
            ((refs, count),) = call.result(self._timeout_s)
            blocks += refs
            trained += count
        self._forget(done)
        rows = iter(range(len(here)))
        where = [places[t.held.worker, t.held.number] if t.held else (0, next(rows)) for t in trajectories]
        pairs = np.array(where, np.int32).reshape(-1, 2)
        return TrainBatch(blocks, pairs[:, 0], pairs[:, 1], np.array(advantages, np.float64), trained)

    def _forget(self, done: Iterable[Trajectory]) -> None:
        for worker, _, numbers in _by_worker(done):
            with contextlib.suppress(WorkerLost):  # it has forgotten everything
                self._rollout.call("forget_tokens", numbers, ranks=[worker], timeout_s=self._timeout_s)


def _by_worker(trajectories: Iterable[Trajectory]) -> list[tuple[int, list[Trajectory], list[int]]]:
    """(worker, the trajectories that it holds, its numbers of them)."""
    held: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.held:
            held[trajectory.held.worker].append(trajectory)
    return [(worker, there, [t.held.number for t in there if t.held]) for worker, there in held.items()]
