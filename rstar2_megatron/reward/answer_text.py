"""Finding the answer in a response. Pure."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
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
                last, content = boxes[brace], text[brace + 1 : match.start()].strip()
    return content


def is_balanced(text: str) -> bool:
    """Whether all braces are balanced; escaped braces do not count."""
    depth = 0
    for brace in _BRACE.findall(text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0
