"""A step of a search: one assistant turn with its tool calls and responses, token for token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from rstar2_megatron.trajectory import FinishReason, Ids, LogProbs, Mask, PerToken, Problem, ToolCall, Trajectory


@dataclass(slots=True, eq=False)
class Step(PerToken):
    """Arrays as in `Trajectory`: generated tokens have mask 1; the tool response and the next turn's opening have mask 0."""

    ARRAYS: ClassVar[dict[str, type]] = {"ids": np.int32, "mask": np.uint8, "logprobs": np.float32}

    text: str
    """The turn, decoded; candidates of equal text are one child."""
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    mask: Mask = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: LogProbs = field(default_factory=lambda: np.empty(0, np.float32))
    tool_calls: list[ToolCall] = field(default_factory=list)
    observation: str | None = None
    """What an environment or loop of the user's answered. None: tools answered, or nothing did."""
    ending: FinishReason | None = None
    """None: another step may follow."""
    answer: str | None = None
    reward: float | None = None
    """1.0 or 0.0 of a finished solution by its known answer; None when it was not graded."""
    value: float | None = None
    """In [-1, 1]: the known answer's verdict or the scorer's score. None: nothing gave one."""

    @property
    def answered(self) -> bool:
        return self.ending is FinishReason.ANSWERED

    @property
    def generated_tokens(self) -> int:
        return int(np.count_nonzero(self.mask))

    def failed(self, *, released: bool) -> bool:
        """Whether a tool call failed: by its typed outcome, or `released`: by the word "error" in its output."""
        if released:
            return any("error" in call.response_text.lower() for call in self.tool_calls)
        return any(call.outcome.is_model_error for call in self.tool_calls)


def step_of(trajectory: Trajectory, before: int, calls_before: int) -> Step:
    """The last turn of a trajectory that had `before` response tokens and `calls_before` tool calls when the turn began."""
    own_answers = trajectory.observations[trajectory.num_turns - 1 :]  # of the last turn, if it has one
    return Step(
        text=trajectory.assistant_texts[-1],
        ids=trajectory.response_ids[before:].copy(),
        mask=trajectory.loss_mask[before:].copy(),
        logprobs=trajectory.rollout_logprobs[before:].copy(),
        tool_calls=list(trajectory.tool_calls[calls_before:]),
        observation=own_answers[0] if own_answers else None,
        ending=trajectory.finish_reason,
        answer=trajectory.answer,
        reward=None if trajectory.reward is None else float(trajectory.is_positive),
    )


def path_trajectory(problem: Problem, steps: Sequence[Step], prompt_ids: Ids | None = None) -> Trajectory:
    """The attempt that these steps make, in the order of the path."""
    empty = Step("")
    parts = [empty, *steps]
    last = parts[-1]
    return Trajectory(
        problem.query_id,
        0,
        prompt_ids=np.empty(0, np.int32) if prompt_ids is None else prompt_ids,
        response_ids=np.concatenate([step.ids for step in parts]),
        loss_mask=np.concatenate([step.mask for step in parts]),
        rollout_logprobs=np.concatenate([step.logprobs for step in parts]),
        assistant_texts=[step.text for step in steps],
        tool_calls=[replace(call) for step in steps for call in step.tool_calls],
        calls_per_turn=[len(step.tool_calls) for step in steps],
        finish_reason=last.ending,
        reward=last.reward,
        answer=last.answer,
    )
