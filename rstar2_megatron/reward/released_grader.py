"""The reward of the public code: either of two graders on the whole response, tool output included.

First grader: a piece of the text is taken for the answer by cue words or a box, and compared leniently. Second grader:
math-verify looks for expressions in the whole text by itself. `<answer>` tags play no part. What follows from this is
kept on purpose, because it is what their curves show: a number that a tool printed can count as the answer, and 300 or 0.03
are right where 3 is asked (they try the solution as a percentage both ways). `reward.mode: paper` has none of it.

The cue words and their order are theirs; equality of algebraic answers is decided by this project's rules.
"""

from __future__ import annotations

import math
from typing import Any

from rstar2_megatron.reward.answer_text import is_balanced, last_boxed, normalise, plain_number
from rstar2_megatron.reward.math_grader import CORRECT, MAX_ANSWER_CHARS, WRONG, grade_answer

RELATIVE_TOLERANCE = 1e-4  # of two numbers
MAX_SHOWN_CHARS = 200

# Cut what precedes the last of each, then what follows the last of each: case does not matter.
_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
# Cut what precedes the last of each in what a box or the cuts above left.
_CUES = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")


def released_answer(response: str) -> str:
    """The piece of a response that the first grader takes for the answer: what the cuts leave, the whole when none applies.

    Theirs also notes whether a cue was found and a digit is left, but decides without it: a boxed word counts.
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
    """(before, found, after) the last `cue`, whatever its case."""
    at = text.lower().rfind(cue)
    return (text, False, "") if at < 0 else (text[:at], True, text[at + len(cue) :])


def numbers_agree(answer: str, solution: str) -> bool:
    """Two numbers within the tolerance, the solution also taken as a percentage either way."""
    ours, theirs = plain_number(normalise(answer).rstrip("%")), plain_number(normalise(solution).rstrip("%"))
    if ours is None or theirs is None:
        return False
    return any(
        math.isclose(ours, value, rel_tol=RELATIVE_TOLERANCE)
        for value in (theirs / 100, theirs, theirs * 100)
    )


def quick_released(response: str, solutions: list[str]) -> str | None:
    """CORRECT where the first grader sees it at once; None where algebra or math-verify must look."""
    answer = released_answer(response)
    if len(answer) <= MAX_ANSWER_CHARS:
        for solution in solutions:
            if normalise(answer).lower() == normalise(solution).lower() or numbers_agree(answer, solution):
                return CORRECT
    return None


def grade_released(response: str, solutions: list[str]) -> str:
    """CORRECT when either grader accepts any solution, else WRONG. May be slow or endless: run it where it can be
    killed.
    """
    if quick_released(response, solutions) == CORRECT:
        return CORRECT
    answer = released_answer(response)
    short = len(answer) <= MAX_ANSWER_CHARS and is_balanced(answer)
    if short and grade_answer(answer, solutions) == CORRECT:
        return CORRECT
    return CORRECT if any(_math_verify_finds(response, solution) for solution in solutions) else WRONG


def _math_verify_finds(response: str, solution: str) -> bool:
    """math-verify with its own search: bare expressions and LaTeX in the response, LaTeX in the boxed solution."""
    # Here: it takes a second, and most answers do not need it.
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    gold: list[Any] = parse(
        f"\\boxed{{{solution}}}", extraction_config=(LatexExtractionConfig(),), parsing_timeout=None
    )
    found: list[Any] = parse(
        response, extraction_config=(ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=None
    )
    return bool(gold and found) and bool(verify(gold, found, timeout_seconds=None))
