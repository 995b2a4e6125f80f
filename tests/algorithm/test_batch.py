from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.algorithm.batch import TokenBlock, TrainBatch, places_behind_tools, train_sequence
from rstar2_megatron.algorithm.correction import tis_weights
from rstar2_megatron.trajectory import FinishReason
from tests.algorithm.trajectories import trajectory


def test_prompt_is_not_trained_and_lists_cover_every_token() -> None:
    t = replace(trajectory(tokens=4), loss_mask=[1, 0, 0, 1], rollout_logprobs=[-0.5, 0.0, 0.0, -0.25])
    sequence = train_sequence(t)
    assert sequence.input_ids.tolist() == [1, 2, 3, 10, 11, 12, 13] and sequence.input_ids.dtype == np.int32
    assert sequence.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 1] and sequence.loss_mask.dtype == np.uint8
    assert sequence.rollout_logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, 0.0, 0.0, -0.25]
    assert sequence.rollout_logprobs.dtype == np.float32
    assert (sequence.length, sequence.num_trained_tokens) == (7, 2)
    assert sequence.advantage == 0.0


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match=r"q#3 ended with infrastructure"):
        train_sequence(trajectory(index=3, finish=FinishReason.INFRASTRUCTURE))
    broken = trajectory()
    broken.rollout_logprobs[1] = float("-inf")
    with pytest.raises(ValueError, match="log-prob -inf at token 4"):
        train_sequence(broken)
    with pytest.raises(ValueError, match="differ in length"):
        train_sequence(replace(trajectory(), loss_mask=[1]))
    with pytest.raises(ValueError, match="empty prompt"):
        train_sequence(replace(trajectory(), prompt_ids=[]))


def test_a_batch_reads_its_sequences_from_blocks_in_its_own_order() -> None:
    first, second, third = (replace(train_sequence(trajectory(index=i, tokens=3 + i)), advantage=0.5 * i) for i in range(3))
    blocks = [TokenBlock.of([third, first]), TokenBlock.of([second])]
    batch = TrainBatch([], np.array([0, 1, 0]), np.array([1, 0, 0]), np.array([0.0, 0.5, 1.0]), 12)
    assert batch.sequences(blocks) == [first, second, third]
    assert batch.select([2, 0]).sequences(blocks) == [third, first]
    assert sum(block.trained_tokens for block in blocks) == batch.trained_tokens
    read = batch.sequences(blocks)[0]
    assert np.shares_memory(read.input_ids, blocks[0].input_ids)  # a rank copies nothing


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([0, 1, 1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 2, 3, 0, 1]), ([0, 1, 1, 1], [0, 0, 0, 0]), ([0, 0], [0, 0])],
)
def test_places_behind_each_tool_response(mask: list[int], expected: list[int]) -> None:
    assert places_behind_tools(np.array(mask, np.uint8)).tolist() == expected


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_places_equal_a_walk_over_the_tokens(generated: list[bool]) -> None:
    generated[0] = False
    expected, turn, place = [], 0, 0
    for before, here in zip([False, *generated], generated):
        turn, place = (turn + 1, 0) if here and not before else (turn, place + 1)
        expected.append(place + 1 if here and turn > 1 else 0)
    assert places_behind_tools(np.array(generated, np.uint8)).tolist() == expected


def test_importance_weights_are_truncated_and_counted() -> None:
    actor = torch.log(torch.tensor([0.5, 0.9, 0.1]))
    engine = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    weights, metrics = tis_weights(actor, engine, clip=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert metrics["tis_clipped"] == 1
    assert metrics["tis_ratio"].item() == pytest.approx(1 + 3 + 0.5)
    assert metrics["tis_ratio_max"].item() == pytest.approx(3)
    assert metrics["rollout_kl"].item() == pytest.approx(3 - 1 - math.log(3) + 0.5 - 1 - math.log(0.5))
    assert metrics["logprob_diff_max"].item() == pytest.approx(math.log(3))
    _, same = tis_weights(actor, actor, clip=2.0)
    assert same["rollout_kl"] == 0 and same["logprob_diff_max"] == 0
    assert tis_weights(actor, actor, clip=1.0)[1]["tis_clipped"] == 0
    empty = torch.zeros(0)
    assert tis_weights(empty, empty, clip=2.0)[1]["tis_ratio_max"] == 0
