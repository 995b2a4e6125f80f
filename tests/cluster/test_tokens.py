"""Tokens from the engine's answer to the training batch: appended, kept beside the engine, read by actor ranks through Ray."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rstar2_megatron.algorithm.batch import train_sequence
from rstar2_megatron.cluster import launch
from rstar2_megatron.cluster.calls import ChannelReader, WorkerFailed, WorkerGroup, WorkerLost
from rstar2_megatron.cluster.launch import TrainingCluster
from rstar2_megatron.cluster.tokens import TokenSource, put_sequences
from rstar2_megatron.rollout.token_buffer import TokenBuffer
from rstar2_megatron.rollout.token_store import TokenStore, give_back
from rstar2_megatron.settings.load import load_settings, to_dict_config
from rstar2_megatron.trajectory import FinishReason, Trajectory
from tests.algorithm.trajectories import trajectory
from tests.cluster.workers import BatchReader, TokenHolder


def test_turns_are_appended_in_their_order_and_with_their_mask() -> None:
    rng, expected = random.Random(0), ([], [], [])
    t = Trajectory("q", 0, [1, 2])
    buffer = TokenBuffer(t)
    for turn in range(40):
        if turn == 20:  # parked, and resumed elsewhere
            t = pickle.loads(pickle.dumps(t))
            buffer = TokenBuffer(t)
        ids = [rng.randrange(1000) for _ in range(rng.randrange(0, 300))]
        logprobs = [-0.5 * turn] * len(ids) if turn % 2 else None
        before = t.response_ids
        buffer.append(ids, logprobs)
        assert before.tolist() == expected[0]  # an array that someone holds does not change
        for values, more in zip(expected, (ids, [turn % 2] * len(ids), logprobs or [0.0] * len(ids)), strict=True):
            values.extend(more)
        t.check()
        assert [getattr(t, name).tolist() for name in ("response_ids", "loss_mask", "rollout_logprobs")] == [*expected]
    assert [t.response_ids.dtype, t.loss_mask.dtype, t.rollout_logprobs.dtype] == [np.int32, np.uint8, np.float32]


def test_appending_copies_each_token_a_few_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    join = np.concatenate

    def counting(parts: list[np.ndarray]) -> np.ndarray:
        nonlocal copied
        copied += len(parts[0])
        return join(parts)

    monkeypatch.setattr(np, "concatenate", counting)
    buffer = TokenBuffer(Trajectory("q", 0, [1]))
    for _ in range(10_000):
        buffer.append([1, 2, 3], None)
    assert copied <= 2 * 3 * 30_000  # of three arrays


def test_an_answer_with_unequal_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match="3 token ids and 2 log-probs"):
        TokenBuffer(Trajectory("q", 0, [1])).append([1, 2, 3], [-1.0, -1.0])
    broken = trajectory(index=4)
    broken.loss_mask = broken.loss_mask[:-1]
    with pytest.raises(ValueError, match=r"q#4: .*loss_mask 3, .* differ in length"):
        TokenStore(0).keep(broken)


def test_a_kept_trajectory_has_its_figures_and_gets_its_tokens_back() -> None:
    t, whole = trajectory(index=2), trajectory(index=2)
    figures = ("prompt_tokens", "response_tokens", "num_trained_tokens", "spans", "logprob_sum", "length")
    store = TokenStore(3)
    store.keep(trajectory(index=1))
    store.keep(t)
    assert t.held and (t.held.worker, t.held.number) == (3, 1) and t != whole
    assert [getattr(t, name) for name in figures] == [getattr(whole, name) for name in figures]
    assert len(pickle.dumps(t)) < len(pickle.dumps(trajectory(index=2, tokens=10_000))) / 10
    t.check()
    give_back(t, store.tokens([t.held.number])[0])
    assert t == whole


def test_a_block_has_the_sequences_that_were_asked_for() -> None:
    store = TokenStore(0)
    for index in range(3):
        store.keep(trajectory(index=index, tokens=4 + index))
    block = store.block([2, 0])
    assert [len(block.sequence(row, 1.0).input_ids) for row in (0, 1)] == [9, 7] and block.trained_tokens == 10
    store.keep(trajectory(index=3, finish=FinishReason.INFRASTRUCTURE))
    with pytest.raises(ValueError, match=r"q#3 ended with infrastructure"):
        store.block([3])
    store.clear()
    with pytest.raises(KeyError):
        store.block([0])


# ------------------------------------------------------------------------------------- through Ray

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


def test_workers_keep_what_a_batch_is_not_done_with(holders: WorkerGroup, readers: WorkerGroup) -> None:
    """The buffer of an asynchronous run: one group is trained on, others wait."""
    there, whole = held(holders, 6)
    source = TokenSource(holders, 60.0)
    batch = source.put_batch(there[:2], [1.0, -1.0], done=there[:3])
    expected = [train_sequence(whole[i], a) for i, a in ((0, 1.0), (1, -1.0))]
    assert readers.call("train_step", batch, timeout_s=120)[0] == expected
    source.fetch(there[3:])
    assert there[3:] == whole[3:]
    with pytest.raises(WorkerFailed, match="KeyError"):
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
    deadline = time.monotonic() + 60
    with pytest.raises(WorkerFailed, match="rollout worker that put them has died"):
        while time.monotonic() < deadline:  # the store keeps the blocks until it hears of the death
            readers.call("train_step", batch, timeout_s=120)


def test_a_rank_that_dies_while_it_unpacks_is_reported_and_the_batch_stays(readers: WorkerGroup) -> None:
    """It kills reader 1; reader 0 still has the batch."""
    sequences = [train_sequence(trajectory(index=i), 0.0) for i in range(4)]
    batch = put_sequences(sequences)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"Readers\.die_reading, rank 1: the worker process died"):
        readers.call("die_reading", batch, timeout_s=120)
    assert time.monotonic() - started < 60
    assert readers.call("train_step", batch, ranks=[0], timeout_s=60) == [sequences]


def test_a_killed_channel_ends_the_wait(cluster: TrainingCluster) -> None:
    import ray  # not before rstar2_megatron.cluster, which sets its environment

    reader = ChannelReader(cluster.channel, "out")
    channels = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith("rollout")]
    assert channels
    for channel in channels:
        ray.kill(ray.get_actor(**channel))
    with pytest.raises(WorkerLost, match="the channel is gone"):
        reader.get(timeout_s=60)
