"""Tokens from the rollout workers to the training batch, through Ray's object store."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rstar2_megatron.algorithm.batch import train_sequence
from rstar2_megatron.cluster.calls import WorkerFailed, WorkerGroup, WorkerLost
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.cluster.tokens import TokenSource, put_sequences
from rstar2_megatron.trajectory import Trajectory
from tests.algorithm.trajectories import trajectory
from tests.cluster.conftest import CALL_S, STORE, Launch
from tests.cluster.weight_ends import Sender
from tests.cluster.workers import TokenHolder


@pytest.fixture(scope="module")
def holders(cluster: TrainingCluster) -> WorkerGroup:
    """The last test here kills them."""
    group: WorkerGroup = cluster.launch(TokenHolder, "Holders", "rollout", cluster.settings, "cpu", max_concurrency=16)
    return group


def held(holders: WorkerGroup, count: int, tokens: int = 4) -> tuple[list[Trajectory], list[Trajectory]]:
    """Trajectories with their tokens in turn at the two workers, and the same ones with their tokens here."""
    whole = [trajectory(index=i, tokens=tokens + i) for i in range(count)]
    parts = [holders.call("fill", whole[rank::2], ranks=[rank], timeout_s=CALL_S)[0] for rank in (0, 1)]
    there = [parts[i % 2][i // 2] for i in range(count)]
    assert not any(len(t.response_ids) for t in there)
    return there, whole


def test_every_rank_reads_the_batch_in_the_drivers_order(holders: WorkerGroup, senders: WorkerGroup) -> None:
    there, whole = held(holders, 6)
    source = TokenSource(holders, 60.0)
    source.fetch([there[1]])
    assert there[1] == whole[1]
    order, advantages = [4, 1, 0, 5], [0.5, -0.5, 1.0, 0.0]  # number 1 is in this process now
    batch = source.put_batch([there[i] for i in order], advantages, done=there)
    expected = [replace(train_sequence(whole[i]), advantage=a) for i, a in zip(order, advantages, strict=True)]
    assert len(batch.blocks) == 3 and batch.trained_tokens == sum(s.num_trained_tokens for s in expected)
    assert senders.call("read", batch, timeout_s=CALL_S) == [expected, expected]
    assert senders.call("read", put_sequences(expected), timeout_s=CALL_S) == [expected, expected]
    with pytest.raises(WorkerFailed, match="KeyError"):  # the rest is forgotten
        source.fetch([there[2]])


def test_workers_keep_what_a_batch_is_not_done_with(holders: WorkerGroup, senders: WorkerGroup) -> None:
    """The buffer of an asynchronous run: one group is trained on, others wait."""
    there, whole = held(holders, 6)
    source = TokenSource(holders, 60.0)
    batch = source.put_batch(there[:2], [1.0, -1.0], done=there[:3])
    expected = [replace(train_sequence(whole[i]), advantage=a) for i, a in ((0, 1.0), (1, -1.0))]
    assert senders.call("read", batch, timeout_s=CALL_S)[0] == expected
    source.fetch(there[3:])
    assert there[3:] == whole[3:]
    with pytest.raises(WorkerFailed, match="KeyError"):
        source.fetch([there[2]])


@pytest.mark.ci
def test_a_batch_larger_than_the_store_arrives_whole(holders: WorkerGroup, senders: WorkerGroup) -> None:
    """Ray moves blocks to the disk of its session directory, and back when they are read."""
    source = TokenSource(holders, 120.0)
    batches, sums = [], []
    for _ in range(3):
        there, whole = held(holders, 2, tokens=3 << 20)
        batches.append(source.put_batch(there, [0.0, 0.0], done=there))
        sums.append([int(np.sum(t.response_ids)) for t in whole])
    assert sum(9 * sum(t.length for t in whole) for _ in batches) > 1.5 * STORE
    for batch, expected in zip(batches, sums, strict=True):
        assert senders.call("sums", batch, 3, timeout_s=CALL_S)[0] == expected


@pytest.mark.ci
def test_blocks_of_a_dead_worker_are_a_clear_error(holders: WorkerGroup, senders: WorkerGroup) -> None:
    """It kills the holders: no later test uses them."""
    there, _ = held(holders, 2)
    batch = TokenSource(holders, 60.0).put_batch(there, [0.0, 0.0], done=there)
    holders.kill()
    deadline = time.monotonic() + 60
    with pytest.raises(WorkerFailed, match="rollout worker that put them has died"):
        while time.monotonic() < deadline:  # the store keeps the blocks until it hears of the death
            senders.call("read", batch, timeout_s=CALL_S)


@pytest.mark.ci
def test_a_rank_that_dies_while_it_unpacks_is_reported_and_the_batch_stays(
    launch: Launch, senders: WorkerGroup, tmp_path: Path
) -> None:
    doomed = launch(Sender, "actor")
    sequences = [train_sequence(trajectory(index=i)) for i in range(4)]
    batch = put_sequences(sequences)
    with pytest.raises(WorkerLost, match=rf"{doomed.name}\.die_reading, rank 1: the worker process died: [^\n]+\Z"):
        doomed.call("die_reading", batch, str(tmp_path / "never"), timeout_s=CALL_S)
    assert senders.call("read", batch, timeout_s=CALL_S) == [sequences, sequences]
