"""Filters of trajectories that the literature of tool-integrated RL names. Each returns whether the trajectory stays.

`algorithm.trajectory_filters` names what is left out. A filter comes before resampling, before groups of equal reward are
rejected and before the group's mean, so a trajectory that is left out has no part in any of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from rstar2_megatron.trajectory import FinishReason, Problem, ToolCall, ToolOutcome, Trajectory

_UNRUN = (FinishReason.TURN_LIMIT, FinishReason.REPEATED_CALL)
_TRUNCATED = (FinishReason.LENGTH_LIMIT, FinishReason.TOOL_RESPONSE_TOO_LONG)


def void_turns(problem: Problem, trajectory: Trajectory) -> bool:
    """SimpleTIR (arXiv 2509.02479, section 3.2): False when a turn has neither a call that could be run nor a final answer."""
    return not num_void_turns(trajectory)


def num_void_turns(trajectory: Trajectory) -> int:
    """Turns that `void_turns` does not let pass.

    A call in the last turn that is allowed, or one too many of the same, ends the trajectory and is not run: no void turn.
    """
    void = [_is_void(text, calls) for text, calls in turns(trajectory)]
    unrun = len(trajectory.calls_per_turn) < len(void) and trajectory.finish_reason in _UNRUN
    return sum(void[:-1] if unrun else void)


def failed_calls(problem: Problem, trajectory: Trajectory) -> bool:
    """TAO-RL (arXiv 2606.03762): False when there are calls and every one of them is an error of the model."""
    calls = trajectory.tool_calls
    return not calls or not all(call.outcome.is_model_error for call in calls)


def malformed_ending(problem: Problem, trajectory: Trajectory) -> bool:
    """False when the trajectory ended by malformed calls, or its last call was malformed and no answer followed."""
    if trajectory.finish_reason is FinishReason.MALFORMED_CALLS:
        return False
    answered = trajectory.finish_reason is FinishReason.ANSWERED
    return answered or not trajectory.tool_calls or trajectory.tool_calls[-1].outcome is not ToolOutcome.MALFORMED


def repeated_calls(problem: Problem, trajectory: Trajectory) -> bool:
    """False when the same call, arguments included, was made twice; calls that cannot be read are not compared."""
    calls = [call for call in trajectory.tool_calls if call.outcome is not ToolOutcome.MALFORMED]
    return trajectory.finish_reason is not FinishReason.REPEATED_CALL and num_distinct(calls) == len(calls)


def num_distinct(calls: Sequence[ToolCall]) -> int:
    """Calls whose name and arguments no earlier one of them has."""
    return len({json.dumps([call.name, call.arguments], sort_keys=True) for call in calls})


def truncated(problem: Problem, trajectory: Trajectory) -> bool:
    """DAPO's overlong filtering (arXiv 2503.14476, section 3.4): False when the token budget ended the trajectory."""
    return trajectory.finish_reason not in _TRUNCATED


FILTERS: dict[str, Callable[[Problem, Trajectory], bool]] = {
    "void_turns": void_turns,
    "failed_calls": failed_calls,
    "malformed_ending": malformed_ending,
    "repeated_calls": repeated_calls,
    "truncated": truncated,
}
"""By their names in `algorithm.trajectory_filters`."""


def turns(trajectory: Trajectory) -> Iterator[tuple[str, list[ToolCall]]]:
    """(text, calls that were run) of each turn."""
    counts = trajectory.calls_per_turn
    begin = 0
    for number, text in enumerate(trajectory.assistant_texts):
        count = counts[number] if number < len(counts) else 0
        yield text, trajectory.tool_calls[begin : begin + count]
        begin += count


def _is_void(text: str, calls: list[ToolCall]) -> bool:
    runnable = any(call.outcome is not ToolOutcome.MALFORMED for call in calls)
    return not runnable and "\\boxed{" not in text and "</answer>" not in text
