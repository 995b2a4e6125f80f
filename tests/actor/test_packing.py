"""Packing loses nothing, keeps the budget, and shares tokens evenly."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.actor.network.attention import PackedBatch
from rstar2_megatron.actor.network.microbatch import PackContext, build_microbatch, padded_lengths
from rstar2_megatron.actor.packing import balance, pack, plan_microbatches, split_minibatches
from tests.actor.tiny import sequences

LENGTHS = st.lists(st.integers(1, 400), max_size=60)


def context(**changes: object) -> PackContext:
    values: dict[str, object] = {
        "frequencies": 1e4 ** -(torch.arange(8) / 8),
        "dtype": torch.float32,
        "device": "cpu",
        "tensor_parallel": 1,
        "sequence_parallel": False,
        "context_parallel": 1,
        "context_rank": 0,
        "implementation": "local",
    }
    return PackContext(**{**values, **changes})  # type: ignore[arg-type]


def test_transformer_engine_is_told_few_longest_lengths() -> None:
    """It chooses kernels, and megatron-core keeps a rotary table on the GPU, for each."""
    told = set()
    for n in range(1, 400, 7):
        batch = build_microbatch(sequences(3, seed=n), [0, 1, 2], context(implementation="transformer_engine"))
        longest = int(batch.packed.cu_seqlens_q.diff().max())
        assert longest <= batch.packed.max_seqlen_q == batch.packed.max_seqlen_kv
        told.add(batch.packed.max_seqlen_q)
    assert len(told) == 1


@given(LENGTHS, st.integers(1, 9))
def test_balance_partitions_and_evens_out(lengths: list[int], ranks: int) -> None:
    parts = balance(lengths, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in parts]
    if lengths:
        assert max(loads) - min(loads) <= max(lengths)
        assert max(loads) <= 4 / 3 * max(max(lengths), sum(lengths) / ranks, *_pair_bound(lengths, ranks))


def _pair_bound(lengths: list[int], ranks: int) -> list[int]:
    """With more sequences than ranks two of the ranks+1 longest share a rank, whoever assigns them."""
    longest = sorted(lengths, reverse=True)
    return [longest[ranks - 1] + longest[ranks]] if len(lengths) > ranks else [0]


@given(LENGTHS, st.integers(400, 2000))
def test_pack_keeps_the_budget_with_few_batches(lengths: list[int], budget: int) -> None:
    batches = pack(range(len(lengths)), lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in batch) for batch in batches]
    assert all(load <= budget for load in loads)
    least_full = 2 / 3 if 2 * max(lengths, default=0) <= budget else 1 / 2  # of all micro-batches but one
    assert len(batches) <= sum(lengths) / budget / least_full + 1
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)


def test_batches_are_full_at_the_lengths_of_training() -> None:
    """2,048 trajectories, 1K to 8K tokens, on 8 ranks, with the budget of the shipped YAMLs."""
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(8.1, 0.5))) for _ in range(2048)]
    for indices in balance(lengths, 8):
        batches = pack(indices, lengths, 10_240)
        assert sum(lengths[i] for i in indices) / (10_240 * len(batches)) > 0.95


def test_a_sequence_beyond_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"500 tokens does not fit a micro-batch of 400.*max_tokens_per_mbs"):
        pack([0, 1], [500, 3], 400)


@given(st.integers(1, 50), st.integers(1, 8))
def test_minibatches_cover_the_step_in_order(count: int, parts: int) -> None:
    ranges = split_minibatches(count, parts)
    assert [i for r in ranges for i in r] == list(range(count))
    assert len(ranges) == min(count, parts)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(LENGTHS, st.integers(1, 6), st.integers(1, 3))
def test_plan_gives_every_rank_something_to_run(lengths: list[int], ranks: int, multiple: int) -> None:
    plan = plan_microbatches(lengths, ranks, max_tokens=400, multiple=multiple)
    assert len(plan.microbatches) == ranks
    assert all(len(own) >= 1 and len(own) % multiple == 0 for own in plan.microbatches)
    flat = [i for own in plan.microbatches for batch in own for i in batch]
    assert sorted(flat) == list(range(len(lengths)))
    numbers = plan.microbatch_of(len(lengths))
    together = [batch for own in plan.microbatches for batch in own]
    assert all(index in together[numbers[index]] for index in range(len(lengths)))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans()
)
def test_padding_is_what_parallelism_needs_and_no_more(lengths: list[int], tp: int, cp: int, sp: bool) -> None:
    padded = padded_lengths(lengths, context(tensor_parallel=tp, sequence_parallel=sp, context_parallel=cp))
    if cp > 1:
        assert all(n % (2 * cp) == 0 for n in padded)
    if sp:
        assert sum(padded) // cp % tp == 0
    assert all(0 <= b - a < 2 * cp for a, b in zip(lengths[:-1], padded[:-1]))
    assert padded[-1] - lengths[-1] < 2 * cp * (1 + (tp if sp else 0))
    if cp == 1 and not sp:
        assert padded == lengths


@given(st.integers(0, 6), st.integers(0, 10_000), st.sampled_from([1, 2, 4]), st.booleans())
def test_ranks_together_want_every_trained_token_once(count: int, seed: int, cp: int, sp: bool) -> None:
    batch = sequences(8, seed=seed, low=8, high=40)
    indices = list(range(count))
    wanted = set()
    for rank in range(cp):
        built = build_microbatch(
            batch, indices, context(context_parallel=cp, context_rank=rank, tensor_parallel=2, sequence_parallel=sp)
        )
        assert built.input_ids.shape == built.positions.shape
        for row, target, owner, place in zip(*(x.tolist() for x in (built.rows, built.targets, built.sequence, built.place))):
            sequence = batch[owner]
            assert sequence.loss_mask[place] == 1
            assert target == sequence.input_ids[place]
            assert int(built.positions[0, row]) == place - 1
            assert int(built.input_ids[0, row]) == sequence.input_ids[place - 1]
            assert (owner, place) not in wanted
            wanted.add((owner, place))
        for owner, place, advantage, rollout in zip(
            built.sequence.tolist(), built.place.tolist(), built.advantages, built.rollout_logprobs
        ):
            assert float(advantage) == pytest.approx(batch[owner].advantage)
            assert float(rollout) == pytest.approx(batch[owner].rollout_logprobs[place])
    assert wanted == {(i, p) for i in indices for p, m in enumerate(batch[i].loss_mask) if m}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 1000))
def test_segments_move_to_a_batch_and_back(lengths: list[int], seed: int) -> None:
    batch = [s for n in lengths for s in sequences(1, seed=seed, low=n + 8, high=n + 8)]
    built = build_microbatch(batch, list(range(len(batch))), context(), "all")
    packed = built.packed
    assert isinstance(packed, PackedBatch)
    tokens = built.input_ids[0]
    if packed.slot_token is None or packed.token_slot is None:
        assert len(set(packed.lengths)) == 1
        return
    padded = tokens[packed.slot_token].view(len(batch), -1)
    for row, sequence in zip(padded, batch):
        assert row[: sequence.length].tolist() == sequence.input_ids.tolist()
    assert torch.equal(padded.reshape(-1)[packed.token_slot], tokens)
