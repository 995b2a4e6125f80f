"""Step-0 gates: each lets right input through and names the figures when it fails."""

from __future__ import annotations

import numpy as np
import pytest

from rstar2_megatron.algorithm.batch import TokenBlock, logprob_difference, train_sequence
from rstar2_megatron.training import gates
from rstar2_megatron.trajectory import FinishReason, Trajectory, VersionSpan


def trajectory() -> Trajectory:
    return Trajectory(
        query_id="q",
        rollout_index=0,
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        loss_mask=[1, 0, 1],
        rollout_logprobs=[-0.5, 0.0, -0.25],
        finish_reason=FinishReason.ANSWERED,
        reward=1.0,
    )


def test_trained_tokens_agree_between_rollout_and_batch() -> None:
    gates.check_trained_tokens([trajectory()], TokenBlock.of([train_sequence(trajectory())]).trained_tokens)
    with pytest.raises(gates.GateError, match=r"2 trained tokens but the training batch holds 3"):
        gates.check_trained_tokens([trajectory()], 3)


def test_actor_trains_every_token_of_the_batch() -> None:
    gates.check_actor_tokens(4, 4.0)
    with pytest.raises(gates.GateError, match="holds 4 trained tokens but the actor trained 3"):
        gates.check_actor_tokens(4, 3.0)


def test_a_token_that_is_too_old_is_named() -> None:
    old, new = trajectory(), trajectory()
    old.version_spans, new.version_spans = ([VersionSpan(0, 1, 4), VersionSpan(2, 3, 6)], [VersionSpan(0, 3, 6)])
    gates.check_staleness([old, new], version=6, bound=2)
    gates.check_staleness([new], version=6, bound=0)
    with pytest.raises(gates.GateError, match=r"weights 6 has tokens of version 4, .*max_staleness=1"):
        gates.check_staleness([new, old], version=6, bound=1)


def difference(*logprobs: float) -> dict[str, float]:
    """Of the sequence with the engine's log-probs [-, -, -0.5, tool, -0.25]."""
    return logprob_difference([train_sequence(trajectory())], [np.array(logprobs, np.float32)])


def test_logprobs_agree_within_the_bound_of_the_precision() -> None:
    close = difference(0.0, 9.0, -0.5004, 9.0, -0.2501)  # prompt and tool tokens do not count
    assert close["max"] == pytest.approx(4e-4, rel=1e-3) and close["mean"] == pytest.approx(2.5e-4, rel=1e-3)
    assert close["tokens"] == 2
    gates.check_logprobs(close, "fp32")
    far = difference(0.0, 0.0, -0.51, 0.0, -0.25)
    with pytest.raises(gates.GateError, match=r"max 1.00e-02 over 2 tokens"):
        gates.check_logprobs(far, "fp32")
    gates.check_logprobs(far, "bf16")
    with pytest.raises(gates.GateError):
        gates.check_logprobs(difference(0.0, 0.0, -0.7, 0.0, -0.25), "bf16")
    with pytest.raises(gates.GateError):
        gates.check_logprobs(difference(0.0, 0.0, float("nan"), 0.0, -0.25), "bf16")
    with pytest.raises(gates.GateError):
        gates.check_logprobs(difference(0.0, 0.0, float("nan"), 0.0, -0.25), "fp32")


def test_a_resumed_actor_scores_the_saved_group_alike() -> None:
    gates.check_resumed_logprobs(difference(0.0, 1.0, -0.5, 1.0, -0.25), "fp32")
    far = difference(0.0, 1.0, -0.51, 1.0, -0.25)
    with pytest.raises(gates.GateError, match=r"resumed actor scores .* max 1\.00e-02 .*earlier global_step_N"):
        gates.check_resumed_logprobs(far, "fp32")
    gates.check_resumed_logprobs(far, "bf16")
    with pytest.raises(gates.GateError, match="resumed actor"):
        gates.check_resumed_logprobs(difference(0.0, 1.0, -9.0, 1.0, -0.25), "bf16")


def test_weights_must_be_the_same_tensors_with_the_same_content() -> None:
    gates.check_weights({"a": 1, "b": 2}, {"a": 1, "b": 2}, 0)
    with pytest.raises(gates.GateError, match=r"1 of 2 tensors of engine 3 .*'b'"):
        gates.check_weights({"a": 1, "b": 2}, {"a": 1, "b": 5}, 3)
    with pytest.raises(gates.GateError, match="different tensors"):
        gates.check_weights({"a": 1, "b": 2}, {"a": 1}, 0)
