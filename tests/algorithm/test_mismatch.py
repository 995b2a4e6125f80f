"""Tokens that are left out for their ratio: by hand, and against a slow second implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.algorithm.mismatch import has_rules, kept_tokens, mismatch_by_turn, without_mismatch
from rstar2_megatron.settings.schema import AlgorithmSettings
from tests.algorithm.tokens import algorithm

LOG2 = math.log(2.0)


def rules(**keys: Any) -> AlgorithmSettings:
    """Bands and caps of any size, also those that a YAML may not have."""
    return algorithm().model_copy(update={"decoupled_loss": True, **keys})


def kept(ratios: list[float], mask: list[int], **keys: Any) -> list[int]:
    log_ratio = np.log(np.array(ratios))
    return kept_tokens(log_ratio, np.array(mask, np.uint8), rules(**keys)).tolist()


def test_by_hand() -> None:
    ratios, mask = [99.0, 0.5, 4.0, 99.0, 0.25, 2.0], [0, 1, 1, 0, 1, 1]  # of the trained: product 1, mean 1
    assert kept(ratios, mask) == mask
    assert kept(ratios, mask, icepop=(0.5, 2.0)) == [0, 1, 0, 0, 0, 1]
    assert kept(ratios, mask, decoupled_weight_cap=2.0) == [0, 1, 0, 0, 1, 1]
    assert kept(ratios, mask, mis_sequence=(0.9, 1.1)) == mask
    assert kept(ratios, mask, mis_sequence=(1.1, 2.0)) == [0] * 6
    ratios[5] = 32.0  # product 16, geometric mean 2
    assert kept(ratios, mask, mis_sequence=(0.1, 15.0)) == [0] * 6 and kept(ratios, mask, mis_sequence=(0.1, 17.0)) == mask
    assert kept(ratios, mask, mis_geometric=(0.5, 1.9)) == [0] * 6 and kept(ratios, mask, mis_geometric=(0.5, 2.1)) == mask
    assert kept(ratios, mask, mis_geometric=(0.5, 2.1), icepop=(0.3, 5.0)) == [0, 1, 1, 0, 0, 0]
    assert kept([3.0, 3.0], [0, 0], icepop=(0.5, 2.0)) == [0, 0]
    assert not has_rules(rules()) and has_rules(rules(decoupled_weight_cap=2.0))
    assert not has_rules(rules(decoupled_weight_cap=2.0, decoupled_loss=False))


def slow(log_ratio: list[float], mask: list[int], settings: AlgorithmSettings) -> list[int]:
    """Token by token, with ratios instead of their logarithms."""
    product, count = 1.0, 0
    for value, trained in zip(log_ratio, mask):
        if trained:
            product *= math.exp(value)
            count += 1
    out = []
    for value, trained in zip(log_ratio, mask):
        ratio = math.exp(value)
        ok = bool(trained)
        if settings.icepop is not None:
            ok = ok and settings.icepop[0] <= ratio <= settings.icepop[1]
        if settings.decoupled_weight_cap is not None:
            ok = ok and ratio <= settings.decoupled_weight_cap
        if settings.mis_sequence is not None:
            ok = ok and settings.mis_sequence[0] <= product <= settings.mis_sequence[1]
        if settings.mis_geometric is not None and count:
            ok = ok and settings.mis_geometric[0] <= product ** (1 / count) <= settings.mis_geometric[1]
        out.append(int(ok))
    return out


band = st.none() | st.tuples(st.floats(0.11, 0.97), st.floats(1.03, 9.1))


@given(
    st.lists(st.tuples(st.floats(-2.5, 2.5), st.integers(0, 1)), min_size=1, max_size=20),
    band,
    band,
    band,
    st.none() | st.floats(0.5, 9.1),
)
def test_equals_the_slow_one(tokens, token, sequence, geometric, cap) -> None:
    keys = {"icepop": token, "mis_sequence": sequence, "mis_geometric": geometric, "decoupled_weight_cap": cap}
    log_ratio, mask = [t[0] for t in tokens], [t[1] for t in tokens]
    bounds = [math.log(x) for b in (token, sequence, geometric) if b for x in b] + ([math.log(cap)] if cap else [])
    trained = [value for value, on in tokens if on]
    values = [*trained, sum(trained), sum(trained) / max(len(trained), 1)]
    if any(abs(value - bound) < 1e-9 for value in values for bound in bounds):
        return  # at the border itself float rounding decides
    ours = kept_tokens(np.array(log_ratio), np.array(mask, np.uint8), rules(**keys))
    assert ours.tolist() == slow(log_ratio, mask, rules(**keys))


def sequence(mask: list[int], engine: list[float]) -> TrainSequence:
    return TrainSequence(list(range(len(mask))), mask, engine, 1.0)


def test_masked_tokens_and_sequences_are_counted_and_the_batch_is_left_as_it_was() -> None:
    batch = [sequence([0, 1, 1, 1], [0, -1, -1, -1]), sequence([0, 1, 0, 1], [0, -1, 0, -1])]
    actor = [np.array([0, -1, -1 + LOG2, -1], np.float32), np.array([0, 4, 9, 4], np.float32)]
    left, shares = without_mismatch(batch, actor, rules(icepop=(0.6, 1.9)))
    assert [s.loss_mask.tolist() for s in left] == [[0, 1, 0, 1], [0, 0, 0, 0]]
    assert [s.num_trained_tokens for s in batch] == [3, 2]
    assert shares == {"masked_tokens": 3.0, "masked_token_fraction": pytest.approx(0.6), "masked_sequence_fraction": 0.5}


def test_mismatch_by_turn() -> None:
    batch = [sequence([0, 1, 1, 0, 1], [0, -1, -1, 0, -2]), sequence([0, 0, 1, 0, 0], [0, 0, -3, 0, 0])]
    actor = [np.array([0, -1.5, -1, 9, -2.25]), np.array([0, 0, -2, 0, 0])]
    assert mismatch_by_turn(batch, actor) == {"1": pytest.approx(0.5), "2": pytest.approx(0.25)}
    assert mismatch_by_turn(batch, actor, most=1) == {"1": pytest.approx(1.75 / 4)}
