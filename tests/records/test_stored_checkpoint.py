"""`global_step_3/data/data.pt` was written by an earlier version: the classes that checkpoints pickle keep their modules."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from rstar2_megatron.algorithm.batch import logprob_difference, train_sequence
from rstar2_megatron.data.loader import ProblemLoader
from rstar2_megatron.records.checkpoint import load_data_state
from rstar2_megatron.records.trajectory_files import read_groups
from rstar2_megatron.rollout.phase import OpenGroup
from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory

STORED = Path(__file__).with_name("global_step_3")


def test_a_checkpoint_of_an_earlier_version_loads() -> None:
    state = load_data_state(STORED)
    assert (state["step"], state["table"]) == (3, {"before_rl": 0.25})
    (group,) = state["carried"]
    assert isinstance(group, OpenGroup) and isinstance(group.problem, Problem)
    assert group.missing == [1] and group.ended[0].finish_reason is FinishReason.ANSWERED
    parked = group.parked[1]
    assert isinstance(parked, Trajectory) and parked.response_ids.tolist() == [3, 4, 5]
    assert parked.held is None and parked.rollout_logprobs.dtype == np.float32
    assert parked.tool_calls[0].arguments == {"code": "1"} and parked.version_spans[0].version == 4


def test_the_loader_goes_on_where_it_was() -> None:
    problems = [Problem(f"p{i}", [{"role": "user", "content": f"{i}+1?"}], [str(i + 1)]) for i in range(6)]
    data = DataSettings(train_data_paths=["x"], rollout_batch_size=2, seed=3, max_prompt_length=8)
    loader = ProblemLoader(problems, data)
    loader.load_state_dict(load_data_state(STORED)["loader"])
    following = [[problem.query_id for problem in loader.next_batch()] for _ in range(2)]
    assert following == [["p3", "p5"], ["p4", "p1"]]


def test_files_of_a_version_with_lists_load() -> None:
    """`earlier/` holds saved rollouts and the scored group of a checkpoint, written with lists of numbers."""
    (group,) = read_groups(STORED.with_name("earlier") / "step_000001.jsonl.gz")
    whole, cut = group.trajectories
    assert whole.response_ids.tolist() == [3, 4, 5] and whole.spans == [(0, 1), (2, 3)]
    assert whole.rollout_logprobs.tolist() == [-0.12345679104328156, 0.0, -2.25]  # float32 in origin
    assert whole.held is None and cut.finish_reason is FinishReason.CUT and not cut.length
    (sequence,), logprobs = pickle.loads((STORED.with_name("earlier") / "scored.pickle").read_bytes())
    assert sequence == train_sequence(whole, 0.5) and sequence.loss_mask.dtype == np.uint8
    assert logprob_difference([sequence], logprobs)["max"] == pytest.approx(0.5 - 0.12345679)
