"""Finding the answer in a response, and in a worked solution. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rstar2_megatron.trajectory import Problem

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKED = re.compile(r"(?:^|\n)####(?!#) *([^\n]+?)\s*\Z")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MOST_WORDS = 20  # of an answer
_NONE = ("proof", "notfound")  # written by NuminaMath in place of one
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def extract_answer(response: str) -> tuple[str | None, str]:
    """(the last `\\boxed{}` inside the last closed `<answer>` of a response (paper section 2.2), or None; why it is None)."""
    tags = _ANSWER.findall(response)
    if not tags:
        return None, "no_answer_tag"
    answer = last_boxed(tags[-1])
    return answer, "no_box" if answer is None else ""


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` with balanced braces; escaped braces do not count.

    A single pass, because a response may hold thousands of boxes that never close.
    """
    boxes = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    open_braces: list[int] = []
    last, content = -1, None
    for match in _BRACE.finditer(text) if boxes else ():
        if match.group() == "{":
            open_braces.append(match.start())
        elif match.group() == "}" and open_braces:
            brace = open_braces.pop()
            if boxes.get(brace, -1) > last:
                last, content = boxes[brace], text[brace + 1 : match.start()]
    return content


def final_answer(solution: str) -> str:
    """The answer of a worked solution: behind `####` (GSM8K), or in its only box (MATH). Any other text is itself."""
    if marked := _MARKED.search(solution):
        return marked[1]
    boxes = len(_BOX.findall(solution)) if _WORD.search(solution) else 0
    return last_boxed(solution) or solution if boxes == 1 else solution


def worked_note(problems: Sequence[Problem], *, more_than: float = 0.0) -> str:
    """What to do about solutions that are whole texts, which no answer equals; "" where not `more_than` this share is."""
    worked = [p for p in problems if all(t in _NONE or len(_WORD.findall(final_answer(t))) > _MOST_WORDS for t in p.solutions)]
    if len(worked) <= more_than * len(problems):
        return ""
    return (
        f"{len(worked)} of {len(problems)} problems have worked solutions or none, which no answer equals, the first is "
        f"{worked[0].query_id}; name another column by data.answer_key, or take the answers out by data.rows=my_data.py:row "
        "(docs/extend.md)"
    )


def is_balanced(text: str) -> bool:
    """Whether all braces are balanced; escaped braces do not count."""
    depth = 0
    for brace in _BRACE.findall(text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0
