"""Penalties of a trajectory, by which resample-on-correct prefers some positives to others.

Paper (arXiv 2508.20722, section 2.2.3): `p_total = p_err + p_format`. `paper_penalty` follows the paper and uses typed tool
outcomes and the trajectory's turns. `released_penalty` follows the public code and uses the response text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real

from rstar2_megatron.algorithm.response_text import response_text
from rstar2_megatron.extension.choice import resolve
from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.trajectory import ToolOutcome, Trajectory

NO_TOOL_PENALTY = 0.5  # p_err of a trajectory without a tool call (paper)
NO_ANSWER_PENALTY = 1.0  # p_format of a trajectory without an answer (paper)


@dataclass(frozen=True, slots=True)
class Penalty:
    """The two penalties of a trajectory; `error` (p_err) and `answer_format` (p_format) are in [0, 1]."""

    error: float
    answer_format: float
    num_answers: int
    """`<answer>` tags in the assistant's turns (paper), closed pairs of tags (released)."""


def paper_penalty(trajectory: Trajectory) -> Penalty:
    """The paper's penalties. Calls that infrastructure spoiled count neither as calls nor as errors."""
    calls = [c for c in trajectory.tool_calls if c.outcome is not ToolOutcome.INFRASTRUCTURE]
    errors = sum(c.outcome.is_model_error for c in calls)
    error = errors / len(calls) if calls else NO_TOOL_PENALTY
    answers = _answers(trajectory)
    if answers == 0:
        answer_format = NO_ANSWER_PENALTY
    else:
        answer_format = min(1.0, (answers - 1) / max(trajectory.num_turns, 1))
    return Penalty(error, answer_format, answers)


def _answers(trajectory: Trajectory) -> int:
    return sum(text.count("<answer>") for text in trajectory.assistant_texts)


def released_penalty(trajectory: Trajectory) -> Penalty:
    """The public code's penalties, measured on the response text.

    Known deviations from the paper: a tool response with the substring "error" is an error (a timeout lacks it, printed
    text may have it). The first turn's header is in the prompt, so an answer without a tool call counts no turn and gets
    p_format 1. Answer tags that do not pair up get 1.
    """
    text = response_text(trajectory)
    responses = list(_spans(text, "<tool_response>", "</tool_response>"))
    errors = sum("error" in response.lower() for response in responses)
    error = errors / len(responses) if responses else NO_TOOL_PENALTY

    opened, closed = text.count("<answer>"), text.count("</answer>")
    pairs = sum(1 for _ in _spans(text, "<answer>", "</answer>"))
    if not opened or not closed:
        return Penalty(error, 1.0, 0)
    turns = sum(1 for _ in _spans(text, "<|im_start|>assistant", "<|im_end|>"))
    if opened != pairs or closed != pairs or turns == 0:
        return Penalty(error, 1.0, pairs)
    return Penalty(error, min((pairs - 1) / turns, 1.0), pairs)


def _spans(text: str, opening: str, closing: str) -> Iterator[str]:
    """The text between each opening and the next closing tag: the matches of a lazy regular expression, ten times faster.

    A step has hundreds of megabytes of text.
    """
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield text[start:stop]
        end = stop + len(closing)


PENALTIES: dict[str, Callable[[Trajectory], Penalty]] = {"paper": paper_penalty, "released": released_penalty}
"""By their names in `penalty` and `mode` of `algorithm.down_sampling.down_sampling_config`."""


def load_penalty(kind: str | UserCode) -> Callable[[Trajectory], Penalty]:
    """A penalty by its name, or the user's own, whose number is a `Penalty` of `error` alone. Raises UserCodeError."""
    key = "algorithm.down_sampling.down_sampling_config.penalty"
    measure: Callable[[Trajectory], Penalty | float] = resolve(key, kind, PENALTIES, "trajectory")
    if not isinstance(kind, UserCode):
        return PENALTIES[kind]

    def own(trajectory: Trajectory) -> Penalty:
        found = measure(trajectory)
        penalty = Penalty(float(found), 0.0, _answers(trajectory)) if isinstance(found, Real) else found
        if not isinstance(penalty, Penalty):
            raise UserCodeError(f"{key}={kind.label} returned a {type(found).__name__}; return a number or a Penalty")
        if not all(math.isfinite(part) and part >= 0 for part in (penalty.error, penalty.answer_format)):
            raise UserCodeError(f"{key}={kind.label} returned {found}; a penalty is finite and at least 0")
        return penalty

    return own
