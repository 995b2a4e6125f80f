"""Trajectories for tests, written as what happened in them."""

from __future__ import annotations

from collections.abc import Sequence

from rstar2_megatron.algorithm.roc import ResampleResult
from rstar2_megatron.trajectory import FinishReason, ToolCall, ToolOutcome, Trajectory

RESPONSES = {
    ToolOutcome.OK: "42",
    ToolOutcome.ERROR: "Traceback (most recent call last):\nNameError: name 'x' is not defined",
    ToolOutcome.TIMEOUT: "timed out after 4 s",
    ToolOutcome.MALFORMED: "Failed to decode tool call: Expecting value",
    ToolOutcome.INFRASTRUCTURE: "the judge is not reachable",
}


def trajectory(
    reward: float | None = 1.0,
    calls: Sequence[ToolOutcome | tuple[ToolOutcome, str]] = (),
    answers: int = 1,
    *,
    index: int = 0,
    finish: FinishReason = FinishReason.ANSWERED,
    tokens: int = 4,
) -> Trajectory:
    """One turn per call and a last turn with `answers` answer tags."""
    tool_calls = []
    for call in calls:
        outcome, text = call if isinstance(call, tuple) else (call, RESPONSES[call])
        tool_calls.append(ToolCall("python_code_with_standard_io", {}, outcome, text, seconds=0.5))
    last = "so " + " ".join(f"<answer>\\boxed{{{i}}}</answer>" for i in range(answers))
    turns = ['let me see <tool_call>{"name": "x"}</tool_call>'] * len(tool_calls)
    return Trajectory(
        query_id="q",
        rollout_index=index,
        prompt_ids=[1, 2, 3],
        response_ids=list(range(10, 10 + tokens)),
        loss_mask=[1] * tokens,
        rollout_logprobs=[-0.5] * tokens,
        assistant_texts=[*turns, last],
        tool_calls=tool_calls,
        calls_per_turn=[1] * len(tool_calls),
        finish_reason=finish,
        reward=reward,
        grade_detail="" if reward is None else ("correct" if reward else "wrong"),
    )


def group(rewards: Sequence[float]) -> list[Trajectory]:
    """Clean trajectories with one good call each."""
    return [trajectory(r, [ToolOutcome.OK], index=i) for i, r in enumerate(rewards)]


def num_kept_positive(result: ResampleResult) -> int:
    """Trajectories with a positive reward among those that resampling kept."""
    return sum((t.reward or 0.0) > 0 for t in result.kept)
