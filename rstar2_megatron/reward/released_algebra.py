"""Released mode: whether an answer equals one of the solutions, by text and exact numbers, then math-verify, then a sympy rule.

A change here changes the released reward. Every step may be slow, deep or endless on hostile input, so the pool runs it in a
process that it can kill. math-verify's own time limits are off: they use signals, which work only in a main thread.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from rstar2_megatron.reward.answer_text import is_balanced, is_word, normalise, quick_verdict, split_unit
from rstar2_megatron.reward.math_grader import CORRECT, MAX_ANSWER_CHARS, UNGRADABLE, WRONG

# math-verify, sympy and pylatexenc take a second to import and most answers need none of them: functions import them.

_SAFE = re.compile(r"[0-9a-zA-Z+\-*/^().,=<>!| ]*")
_NAMES = re.compile(r"[a-zA-Z]+")
_KNOWN = "sqrt pi sin cos tan cot sec csc asin acos atan log ln exp oo e i abs"
_ALLOWED_NAMES = frozenset(_KNOWN.split())
_ATTRIBUTE = re.compile(r"[a-zA-Z)\]]\s*\.|\.\s*[a-zA-Z(]")


def grade_answer(answer: str, solutions: list[str]) -> str:
    """CORRECT when the answer equals any solution, else WRONG, or UNGRADABLE when it cannot be parsed."""
    if len(answer) > MAX_ANSWER_CHARS or not is_balanced(answer):
        return UNGRADABLE
    readable = False
    for solution in solutions:
        verdict = quick_verdict(answer, solution)
        if verdict is None:
            verdict = _math_verify(answer, solution)
            if verdict is not True:
                by_rule = _sympy_rule(answer, solution)
                verdict = by_rule if by_rule is not None else verdict
        if verdict:
            return CORRECT
        readable = readable or verdict is not None
    return WRONG if readable else UNGRADABLE


# ------------------------------------------------------------------------------------------ math-verify


@functools.cache
def _extraction() -> tuple[Any, ...]:
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about its own timeouts being off
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    configs = _extraction()
    return parse(f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=None)


def _math_verify(answer: str, solution: str) -> bool | None:
    """math-verify's verdict; None when it cannot parse the answer or the solution."""
    from math_verify import verify

    ours, theirs = normalise(answer), normalise(solution)
    candidates = [(ours, theirs)]
    (our_value, our_unit), (their_value, their_unit) = split_unit(ours), split_unit(theirs)
    if (our_unit or their_unit) and (our_unit == their_unit or not our_unit or not their_unit):
        candidates.append((our_value, their_value))
    readable = False
    for ours, theirs in candidates:
        target, gold = _parse(ours), _parse(theirs)
        if not _is_math(target) or not _is_math(gold):
            continue
        readable = True
        if verify(gold, target, timeout_seconds=None):
            return True
    return False if readable else None


def _is_math(parsed: list[Any]) -> bool:
    """Whether parsing succeeded: math-verify returns plain text otherwise, and equal text does not prove equal value."""
    return any(not isinstance(item, str) for item in parsed)


# ------------------------------------------------------------------------------------------ sympy rule


def _sympy_rule(answer: str, solution: str) -> bool | None:
    """Element-wise equality of tuples, sets and intervals by `simplify(a - b) == 0`; None if it cannot be parsed.

    pylatexenc converts the LaTeX, so that forms which math-verify's grammar rejects still count.
    """
    ours, theirs = _plain(answer), _plain(solution)
    our_open, our_parts, our_close = _split(ours)
    their_open, their_parts, their_close = _split(theirs)
    if (our_open, our_close) != (their_open, their_close) or len(our_parts) != len(their_parts):
        return None
    if our_open == "{":
        left = list(their_parts)
        for part in our_parts:
            match = next((other for other in left if _equal(part, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    verdicts = [_equal(a, b) for a, b in zip(our_parts, their_parts)]
    if None in verdicts:
        return None
    return all(verdicts)


def _plain(text: str) -> str:
    from pylatexenc.latex2text import LatexNodes2Text

    text = normalise(text).replace("\\{", "⦃").replace("\\}", "⦄")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"(\1)/(\2)", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
    text = re.sub(r"\\sqrt\s*\[([^\[\]{}]*)\]\s*\{([^{}]*)\}", r"((\2)^(1/(\1)))", text)
    text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
    text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text)
    if "\\" in text:
        text = LatexNodes2Text().latex_to_text(text)
    for old, new in (("√", "sqrt"), ("π", "pi"), ("∞", "oo"), ("\u222a", "U"), ("·", "*"), ("\u00d7", "*"), ("^", "**")):
        text = text.replace(old, new)
    return text.replace("⦃", "{").replace("⦄", "}").strip()


def _split(text: str) -> tuple[str, list[str], str]:
    """("(", ["1", "2"], ")") for "(1, 2)"; the brackets are empty for a single value."""
    pairs = {"(": ")]", "[": "])", "{": "}"}
    if len(text) > 2 and text[0] in pairs and text[-1] in pairs[text[0]]:
        parts, depth, start = [], 0, 1
        for i, char in enumerate(text[1:-1], 1):
            depth += (char in "([{") - (char in ")]}")
            if depth < 0:
                return "", [text], ""
            if char == "," and depth == 0:
                parts.append(text[start:i].strip())
                start = i + 1
        parts.append(text[start:-1].strip())
        if len(parts) > 1 or text[0] == "{":
            return text[0], parts, text[-1]
    return "", [text], ""


def _equal(a: str, b: str) -> bool | None:
    verdict = quick_verdict(a, b)
    if verdict is not None:
        return verdict
    left, right = _expression(a), _expression(b)
    if left is None or right is None:
        return None
    import sympy

    try:
        difference = left - right
        if difference.free_symbols == {sympy.Symbol("i")}:  # without another letter it is no index
            difference = difference.subs("i", sympy.I)
        return bool(sympy.simplify(difference) == 0)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return False


def _expression(text: str) -> Any:
    """The sympy expression of a plain text, or None.

    sympy's parser evaluates Python, so only digits, operators, single letters and known functions are accepted.
    """
    names = _NAMES.findall(text)
    safe = _SAFE.fullmatch(text) and not _ATTRIBUTE.search(text) and not is_word(text) and "=" not in text
    if not safe or len(text) > 500 or any(len(n) > 1 and n not in _ALLOWED_NAMES for n in names):
        return None
    from sympy.parsing.sympy_parser import (
        implicit_multiplication_application,
        parse_expr,
        rationalize,
        standard_transformations,
    )

    transformations = (*standard_transformations, rationalize, implicit_multiplication_application)
    try:
        return parse_expr(text.replace("^", "**"), transformations=transformations)
    except (SyntaxError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
