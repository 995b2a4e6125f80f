"""Training batches through a real object store: from rollout workers and the driver to actor ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from rstar2_megatron.algorithm.batch import train_sequence
from rstar2_megatron.cluster import launch
from rstar2_megatron.cluster.calls import ChannelReader, WorkerFailed, WorkerGroup, WorkerLost
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.cluster.tokens import TokenSource, put_sequences
from rstar2_megatron.settings.load import load_settings, to_dict_config
from rstar2_megatron.trajectory import Trajectory
from tests.algorithm.trajectories import trajectory
from tests.cluster.workers import BatchReader, TokenHolder

STORE = 96 << 20  # bytes


@pytest.fixture(scope="module")
def cluster() -> Iterator[TrainingCluster]:
    settings = load_settings("rstar2-tiny-cpu", [])
    cluster = TrainingCluster(settings, to_dict_config(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "object_store_bytes", lambda settings: STORE)
        cluster.start()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def holders(cluster: TrainingCluster) -> WorkerGroup:
    return cluster._launch(TokenHolder, "Holders", "rollout", cluster.settings, "cpu", max_concurrency=16)


@pytest.fixture(scope="module")
def readers(cluster: TrainingCluster) -> WorkerGroup:
    return cluster._launch(BatchReader, "Readers", "actor", cluster.settings)


def held(holders: WorkerGroup, count: int, tokens: int = 4) -> tuple[list[Trajectory], list[Trajectory]]:
    """Trajectories with their tokens in turn at the two workers, and the same ones with their tokens here."""
    whole = [trajectory(index=i, tokens=tokens + i) for i in range(count)]
    parts = [holders.call("fill", whole[rank::2], ranks=[rank], timeout_s=120)[0] for rank in (0, 1)]
    there = [parts[i % 2][i // 2] for i in range(count)]
    assert not any(len(t.response_ids) for t in there)
    return there, whole


def test_every_rank_reads_the_batch_in_the_drivers_order(holders: WorkerGroup, readers: WorkerGroup) -> None:
    there, whole = held(holders, 6)
    source = TokenSource(holders, 60.0)
    source.fetch([there[1]])
    assert there[1] == whole[1]
    order, advantages = [4, 1, 0, 5], [0.5, -0.5, 1.0, 0.0]  # number 1 is in this process now
    batch = source.put_batch([there[i] for i in order], advantages)
    expected = [train_sequence(whole[i], a) for i, a in zip(order, advantages, strict=True)]
    assert len(batch.blocks) == 3 and batch.trained_tokens == sum(s.num_trained_tokens for s in expected)
    assert readers.call("train_step", batch, timeout_s=120) == [expected, []]  # one rank answers
    assert readers.call("train_step", put_sequences(expected), timeout_s=60) == [expected, []]
    with pytest.raises(WorkerFailed, match="KeyError"):  # the rest is forgotten
        source.fetch([there[2]])


def test_a_batch_larger_than_the_store_arrives_whole(holders: WorkerGroup, readers: WorkerGroup) -> None:
    """Ray moves blocks to the disk of its session directory, and back when they are read."""
    source = TokenSource(holders, 120.0)
    batches, sums = [], []
    for _ in range(3):
        there, whole = held(holders, 2, tokens=3 << 20)
        batches.append(source.put_batch(there, [0.0, 0.0]))
        sums.append([int(np.sum(t.response_ids)) for t in whole])
    assert sum(9 * sum(t.length for t in whole) for _ in batches) > 1.5 * STORE
    for batch, expected in zip(batches, sums, strict=True):
        assert readers.call("response_sums", batch, 3, timeout_s=120)[0] == expected


def test_blocks_of_a_dead_worker_are_a_clear_error(holders: WorkerGroup, readers: WorkerGroup) -> None:
    """It kills the holders: no later test uses them."""
    there, _ = held(holders, 2)
    batch = TokenSource(holders, 60.0).put_batch(there, [0.0, 0.0])
    holders.kill()
    with pytest.raises(WorkerFailed, match="rollout worker that put them has died"):
        readers.call("train_step", batch, timeout_s=120)


def test_a_rank_that_dies_while_it_unpacks_is_reported_and_the_batch_stays(readers: WorkerGroup) -> None:
    """It kills reader 1; reader 0 still has the batch."""
    sequences = [train_sequence(trajectory(index=i), 0.0) for i in range(4)]
    batch = put_sequences(sequences)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"Readers\.die_reading: the worker process died"):
        readers.call("die_reading", batch, timeout_s=120)
    assert time.monotonic() - started < 60
    assert readers.call("train_step", batch, ranks=[0], timeout_s=60) == [sequences]


def test_a_killed_channel_ends_the_wait(cluster: TrainingCluster) -> None:
    """Last in this file: nothing goes through the channel afterwards."""
    import ray  # not before rstar2_megatron.cluster, which sets its environment

    reader = ChannelReader(cluster.channel, "out")
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("rollout"):
            ray.kill(ray.get_actor(**actor))
    with pytest.raises(WorkerLost, match="the channel is gone"):
        reader.get(timeout_s=60)
