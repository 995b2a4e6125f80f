"""Tokens of a trajectory: appended turn by turn, kept beside the engine, given back."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from rstar2_megatron.rollout.token_store import TokenStore, give_back
from rstar2_megatron.trajectory import FinishReason, Trajectory
from tests.algorithm.trajectories import trajectory


def test_turns_are_appended_in_their_order_and_with_their_mask() -> None:
    rng, expected = random.Random(0), ([], [], [])
    t = Trajectory("q", 0, [1, 2])
    for turn in range(40):
        if turn == 20:  # parked, and resumed elsewhere
            t = pickle.loads(pickle.dumps(t))
        ids = [rng.randrange(1000) for _ in range(rng.randrange(0, 300))]
        logprobs = [-0.5 * turn] * len(ids) if turn % 2 else None
        before = t.response_ids
        t.append(ids, logprobs)
        assert before.tolist() == expected[0]  # an array that someone holds does not change
        for values, more in zip(expected, (ids, [turn % 2] * len(ids), logprobs or [0.0] * len(ids)), strict=True):
            values.extend(more)
        t.check()
        assert [getattr(t, name).tolist() for name in ("response_ids", "loss_mask", "rollout_logprobs")] == [*expected]
    assert [t.response_ids.dtype, t.loss_mask.dtype, t.rollout_logprobs.dtype] == [np.int32, np.uint8, np.float32]


def test_an_answer_with_unequal_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match="3 token ids and 2 log-probs"):
        Trajectory("q", 0, [1]).append([1, 2, 3], [-1.0, -1.0])
    broken = trajectory(index=4)
    broken.loss_mask = broken.loss_mask[:-1]
    with pytest.raises(ValueError, match=r"q#4: .*loss_mask 3, .* differ in length"):
        TokenStore(0).keep(broken)


def test_a_kept_trajectory_has_its_figures_and_gets_its_tokens_back() -> None:
    t, whole = trajectory(index=2), trajectory(index=2)
    lengths = ("prompt_tokens", "response_tokens", "num_trained_tokens", "length")
    figures = (*lengths, "spans", "logprob_sum", "logprob_min", "num_improbable")
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
    store.forget([0, 1])
    with pytest.raises(KeyError):
        store.block([0])
