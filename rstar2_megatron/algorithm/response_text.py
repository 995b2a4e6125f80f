"""A trajectory's response as the text that the public code decodes; the `released` rules read it. Pure."""

from __future__ import annotations

from rstar2_megatron.trajectory import FinishReason, Trajectory


def response_text(trajectory: Trajectory) -> str:
    """The response text after the first turn's header, with special tokens.

    A tool response that exceeded the token budget is not part of it, and a turn that the budget cut has no end token. When
    turns have several calls, the surplus responses are placed before the last turn; the counts do not depend on that. What an
    environment or loop of the user's answered is in its place, as a tool's response is.
    """
    turns = [turn.removesuffix("<|im_end|>") for turn in trajectory.assistant_texts]
    shown = [call.response_text for call in trajectory.tool_calls]
    cut = trajectory.finish_reason is FinishReason.LENGTH_LIMIT
    num_gaps = max(len(turns) - 1, 0)
    if cut and len(shown) > num_gaps:
        turns.append("")  # the budget ended before the first token of the next turn
        num_gaps += 1
    if trajectory.finish_reason is FinishReason.TOOL_RESPONSE_TOO_LONG:
        shown = shown[:num_gaps]
    pieces: list[str] = []
    for i, turn in enumerate(turns):
        pieces.append(turn)
        if i < num_gaps:
            body = _answered(trajectory, i)
            if body is None:
                responses = shown[i:] if i == num_gaps - 1 else shown[i : i + 1]
                body = "".join(f"<tool_response>\n{response}\n</tool_response>" for response in responses)
            pieces.append(f"<|im_end|><|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n<reason>")
        elif not cut:
            pieces.append("<|im_end|>")
    return "".join(pieces)


def _answered(trajectory: Trajectory, turn: int) -> str | None:
    """What came behind a turn of a trajectory with an environment or a loop of the user's; None where only tools answer."""
    if not trajectory.observations:
        return None
    if answer := "".join(trajectory.observations[turn : turn + 1]):
        return answer
    begin = sum(trajectory.calls_per_turn[:turn])
    calls = trajectory.tool_calls[begin : begin + sum(trajectory.calls_per_turn[turn : turn + 1])]
    return "".join(f"<tool_response>\n{call.response_text}\n</tool_response>" for call in calls)
