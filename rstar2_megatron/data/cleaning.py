"""Cleaning of a problem's text and answer before training. Pure.

Public sets wrap their problems in instructions of their own ("The last line of your response should be of the
form Answer: $Answer"). They contradict the template, which asks for \\boxed{} inside answer tags, so they are
removed here. Answers are integers only, as in the paper (arXiv 2508.20722, section 3.2).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

from rstar2_megatron.data.json_text import BLANKS

# Where an answer is to be put. Other words ("modulo 1000", "rounded") are part of what is asked.
_PLACE = (
    r"(?:\W+(?:in|within|inside|into|using|as|with|by|on|to|an?|the|its|own|line|latex|form|format|box(?:es|ed)?|command|of|"
    r"single|only|enclosed|number|integer))*\W*?"
)
# Instructions before a problem, and after it; each match is removed until none is left.
_WRAPPERS = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"\A\s*Solve the following math problem (?:step by step|efficiently and clearly)\.?\s*"
        r"(?:The last line of your response should be of the form\s+[\"']?Answer:\s*\$?\\?\w+\$?[\"']?"
        r"\s*\(without quotes\)\s*where\s+\$?\\?\w+\$?\s+is the answer to the problem\.?)?",
        r"\A\s*Please (?:solve|answer) the following (?:math )?(?:problem|question)\b[^\n]{0,120}?[:.]\s*\n+",
        r"\A\s*(?:Problem|Question)\s*:\s*\n*",
        r"\A\s*请?(?:一步一步|逐步)(?:地)?(?:解决|解答|推理)[^\n]{0,60}[。:\uff1a]\s*\n+",
        r"\s*Remember to put your answer on its own line after\s+[\"']?Answer:[\"']?"
        r"(?:,? and you do not need to use a \\+boxed command)?\.?[\"']?\s*$",
        r"\s*(?:Let'?s think|Please reason|Think|Reason) step[ -]by[ -]step[,.]?\s*(?:and)?\s*"
        r"(?:(?:please )?(?:output|put|place|give|present|write) (?:the|your) (?:final )?answer"
        + _PLACE
        + r"\\+boxed\s*\{[^{}]*\})?\.?\s*$",
        r"\s*(?:Please )?(?:put|place|give|write|output|return|enclose) (?:the|your) (?:final )?answer"
        + _PLACE
        + r"\\+boxed\s*\{[^{}]*\}\.?\s*$",
        r"\s*Present the answer in LaTe?X format:\s*\\+boxed\{[^{}]*\}\.?\s*$",
        r"\s*The last line of your response should be of the form[^\n]*$",
        r"\s*Your final answer should be of the form\s+[\"']?Answer:[^\n]*$",
        r"\s*请?(?:把|将)(?:你的)?(?:最终)?答案[放写填置用以在入到于进个一框中里内的成\s]{0,20}\\+boxed\s*\{[^{}]*\}[^\n]{0,4}\s*$",
    )
)
# A problem must not match this after cleaning: it would ask for another form of answer than the template.
CONTRADICTION = re.compile(r"Answer:\s*\$Answer|\(without quotes\)|after [\"']Answer:[\"']", re.IGNORECASE)

_MARKS = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c).startswith("M"))
_HAN = r"[\u3400-\u9fff]"
_WORD = rf"{_HAN}|(?:(?!{_HAN})[^\W_]|[{_MARKS}])+"  # marks: of vowels in Hindi and Thai, which re counts to no word
_WORDS = re.compile(_WORD)
# A hyphen before a word and the bold of Markdown are dressing; a point between digits and the dash of f' are not.
_WORDS_AND_OPERATORS = re.compile(
    _WORD + r"|(?<=[0-9)])[!%]|[+/<>=^|()\[\]{}\u00b1\u00d7\u00f7\u2200-\u22ff]|-(?![^\W\d_]{2})|(?<!\*)\*(?!\*)"
    r"|(?<=\d)\.(?=\d)|(?<=\b[^\W\d_])'+"
)
# \( and \[ begin formulas as $ does, and braces of LaTeX around one number or word change nothing.
_DRESSING = re.compile(r"\\[()\[\]]|(?<!\\)\{(\s*+[\w.,]*+\s*+)\}")
_ONE_SIGN = str.maketrans("\u2212\u2019\u2032", "-''")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_RAISED = re.compile(r"[\u00b2\u00b3\u00b9\u2070-\u209f]+")  # superscripts and subscripts
# Other ways to write the same character: 1 in full width or in bold, a blank that does not break. Not so 2 in the power,
# in a circle or in a fraction.
_SAME = ("<wide>", "<narrow>", "<font>", "<noBreak>", "<compat> 0020")


def strip_wrappers(text: str) -> str:
    """The problem without instructions about the form of the answer."""
    text = text.strip(BLANKS)
    previous = None
    while text != previous:
        previous = text
        for pattern in _WRAPPERS:
            text = pattern.sub("", text, count=1).strip(BLANKS)
    return text


def integer_answer(answer: str, max_digits: int) -> str | None:
    """The answer as a plain integer ("-12"), or None when it is no integer or has more than `max_digits` digits.

    Reads $..$, \\boxed{..}, thousands separators (1,234 or 1{,}234 or 1\\,234), a plus, and a zero fraction.
    """
    same = (unicodedata.normalize("NFKC", c) if unicodedata.decomposition(c).startswith(_SAME) else c for c in answer)
    text = "".join(same).strip().replace("\u2212", "-")
    while (inner := re.fullmatch(r"\$+(.*?)\$+|\\\((.*)\\\)|\\boxed\s*\{(.*)\}", text, re.DOTALL)) is not None:
        text = next(group for group in inner.groups() if group is not None).strip()
    text = re.sub(r"\\,(?=\d{3}(?!\d))", ",", text.replace("\\!", "").replace("{,}", ",").removesuffix("\\,"))
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.0*)?", text):  # not with blanks: 100, 200 is a list
        text = text.replace(",", "")
    text = re.sub(r"\.0*$", "", text)
    digits = text.lstrip("+-0") or "0"
    if not _INTEGER.fullmatch(text) or len(digits) > max_digits:
        return None
    return f"-{digits}" if text.startswith("-") and digits != "0" else digits


def words(text: str, operators: bool = False) -> list[str]:
    """Lower-case words and numbers of any script, and single Chinese characters, in which n-grams are compared.

    operators: also + - < and the like, by which two problems of the same words differ.
    """
    text = _RAISED.sub(lambda found: f" ^{found[0]} " if found[0] < "\u2080" else f" {found[0]} ", text)  # as LaTeX's 2^7
    text = _DRESSING.sub(r" \1 ", text.replace("\\%", "%"))
    same = unicodedata.normalize("NFKC", text).lower().translate(_ONE_SIGN)
    return (_WORDS_AND_OPERATORS if operators else _WORDS).findall(same)


def fingerprint(text_words: list[str]) -> str:
    """Equal for problems that differ only in punctuation, case, spacing or LaTeX dressing; 16 hex digits."""
    return hashlib.blake2b(" ".join(text_words).encode(), digest_size=8).hexdigest()
