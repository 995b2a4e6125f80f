"""The reward of the public code: a response is right if either of two graders accepts it, tool output included.

The first grader extracts a piece of the text by cue words or a box and compares it leniently. In the second, math-verify
searches the whole text for expressions. `<answer>` tags have no effect. The consequences are kept, because the public curves
contain them: a number printed by a tool can count as the answer, and 300 or 0.03 are right where the solution is 3 (the
solution is also tried as a percentage, both ways). `reward.mode: paper` has none of these.

The cue words and their order are those of the public code; algebraic answers are compared by this project's rules.
"""

from __future__ import annotations

import math
from typing import Any

from rstar2_megatron.reward.answer_text import is_balanced, last_boxed, normalise, plain_number
from rstar2_megatron.reward.math_grader import CORRECT, MAX_ANSWER_CHARS, WRONG
from rstar2_megatron.reward.released_algebra import grade_answer

RELATIVE_TOLERANCE = 1e-4  # of two numbers
MAX_SHOWN_CHARS = 200

# The text before the last of each _BEFORE is cut, then the text after the last of each _AFTER, in any case.
_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
# The text before the last of each is cut, after the cuts above and the box.
_CUES = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


def released_answer(response: str) -> str:
    """The answer as the first grader extracts it: the rest after all cuts, or the whole response when none applies.

    The public code also records whether a cue and a digit were found, without using it: a boxed word counts.
    """
    text = response
    for cue in _BEFORE:
        _, at, after = _split_last(text, cue)
        if at:
            text = after.strip()
    for cue in _AFTER:
        before, at, _ = _split_last(text, cue)
        if at:
            text = before.strip()
    text = last_boxed(text) or text
    text = text.rpartition(". ")[0].strip() if ". " in text else text
    for cue in _CUES:
        _, at, after = _split_last(text, cue)
        if at:
            text = after.strip()
    return text


def _split_last(text: str, cue: str) -> tuple[str, bool, str]:
    """(text before, found, text after) the last `cue`, in any case."""
    at = text.lower().rfind(cue)
    return (text, False, "") if at < 0 else (text[:at], True, text[at + len(cue) :])


def numbers_agree(answer: str, solution: str) -> bool:
    """Whether two numbers agree within the tolerance; the solution is also tried as a percentage, both ways."""
    ours, theirs = plain_number(normalise(answer).rstrip("%")), plain_number(normalise(solution).rstrip("%"))
    if ours is None or theirs is None:
        return False
    return any(math.isclose(ours, value, rel_tol=RELATIVE_TOLERANCE) for value in (theirs / 100, theirs, theirs * 100))


def quick_released(response: str, solutions: list[str]) -> str | None:
    """CORRECT where text or numbers decide; None where algebra or math-verify is needed."""
    answer = released_answer(response)
    if len(answer) <= MAX_ANSWER_CHARS:
        for solution in solutions:
            if normalise(answer).lower() == normalise(solution).lower() or numbers_agree(answer, solution):
                return CORRECT
    return None


def grade_released(response: str, solutions: list[str]) -> str:
    """CORRECT when either grader accepts any solution, else WRONG. It may be endless: run it in a killable process."""
    if quick_released(response, solutions) == CORRECT:
        return CORRECT
    answer = released_answer(response)
    short = len(answer) <= MAX_ANSWER_CHARS and is_balanced(answer)
    if short and grade_answer(answer, solutions) == CORRECT:
        return CORRECT
    return CORRECT if any(_math_verify_finds(response, solution) for solution in solutions) else WRONG


def _math_verify_finds(response: str, solution: str) -> bool:
    """math-verify with its own search: bare expressions and LaTeX in the response, LaTeX in the boxed solution."""
    # Imported here: it takes a second, and most answers do not need it.
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    gold: list[Any] = parse(f"\\boxed{{{solution}}}", extraction_config=(LatexExtractionConfig(),), parsing_timeout=None)
    found: list[Any] = parse(
        response, extraction_config=(ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None
    )
    return bool(gold and found) and bool(verify(gold, found, timeout_seconds=None))
