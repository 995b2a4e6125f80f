"""A trajectory's response as the text that the public code decodes; the `released` rules read it. Pure."""

from __future__ import annotations

from itertools import zip_longest

from rstar2_megatron.algorithm.filters import turns as turns_of
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
    answered = _answered(trajectory)
    pieces: list[str] = []
    for i, turn in enumerate(turns):
        pieces.append(turn)
        if i < num_gaps:
            responses = shown[i:] if i == num_gaps - 1 else shown[i : i + 1]
            body = answered[i] if i < len(answered) else "".join(map(_wrapped, responses))
            pieces.append(f"<|im_end|><|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n<reason>")
        elif not cut:
            pieces.append("<|im_end|>")
    return "".join(pieces)


def _answered(trajectory: Trajectory) -> list[str]:
    """What came behind each turn of a trajectory with an environment or a loop of the user's; [] where only tools answer."""
    if not trajectory.observations:
        return []
    by_tools = ("".join(map(_wrapped, (call.response_text for call in calls))) for _, calls in turns_of(trajectory))
    return [said or responses for said, responses in zip_longest(trajectory.observations, by_tools, fillvalue="")]


def _wrapped(response: str) -> str:
    return f"<tool_response>\n{response}\n</tool_response>"
