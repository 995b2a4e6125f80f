"""Finding the answer in a response, plain numbers; then how released mode spells and compares answers without algebra. Pure.

Paper mode spells and compares by `spelling` and `comparison`. A change of `normalise` or `quick_verdict` changes the released
reward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)

_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|\\q?quad\b|~|\s+")
_NOISE = re.compile(r"\\(?:left|right|middle|displaystyle|textstyle|limits|bigl|bigr|Bigl|Bigr|big|Big)(?![a-zA-Z])")
_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|boldsymbol)\s*\{([^{}]*)\}")
_DEGREE = re.compile(r"\^?\s*\{?\s*\\(?:circ|degree)\b\s*\}?|°")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?![\d,])")
_TRAILING_UNIT = re.compile(
    r"^(?P<value>.*?(?:[\d)}\]]|\\pi))\s*(?P<unit>(?:square|cubic|sq\.?|cu\.?)?\s*[a-zA-Z/ ]+?)(?:\^\{?[23]\}?)?\.?$", re.DOTALL
)
_UNIT_WORDS = """
mm cm dm m km in inch inches ft foot feet yd yard yards mi mile miles mg g kg gram grams kilogram kilograms lb lbs
oz pound pounds ounce ounces ton tons l ml liter liters litre litres s sec second seconds min mins minute minutes
h hr hrs hour hours day days week weeks month months year years dollar dollars cent cents euro euros percent degree
degrees deg rad radian radians unit units mph km/h m/s km/hr miles/hour meter meters metre metres centimeter
centimeters kilometer kilometers people person students apples ways times integers solutions points square cubic
sq cu per
"""
UNITS = frozenset(_UNIT_WORDS.split())
UNIT_ALIASES = {
    alias: name
    for name, aliases in {
        "cm": "centimeter centimetre",
        "m": "meter metre",
        "km": "kilometer kilometre",
        "in": "inch inche",
        "ft": "foot feet",
        "yd": "yard",
        "mi": "mile",
        "g": "gram",
        "kg": "kilogram",
        "lb": "pound",
        "l": "liter litre",
        "s": "sec second",
        "min": "minute",
        "h": "hr hour km/hr",
        "deg": "degree",
        "sq": "square",
        "cu": "cubic",
    }.items()
    for alias in aliases.split()
}
_SPACED_THOUSANDS = re.compile(r"[+-]?\s*\d{1,3}(?: \d{3})+")
_SPACED_DIGITS = re.compile(r"[+-]?[\d. ]*\d[. ]* [. ]*\d[\d. ]*")
_MIXED = re.compile(r"([+-]?)(\d+) (\d+)/(\d+)")
IN_BASE = re.compile(r"\(?([0-9A-Fa-f]*\d[0-9A-Fa-f]*)\)?\s*_\s*\{?\s*(\d+)\s*\}?")
_NOT_EQUAL = re.compile(r"\\neq?(?![a-zA-Z])|\\not\s*=|≠|!=")
_RELATION = re.compile(r"\\(?:ne|geq?|leq?|geqslant|leqslant|gt|lt)(?![a-zA-Z])|[<>\u2264\u2265]")
_NATURAL_LOG = re.compile(r"\\log\s*_\s*(?:e|\{\s*e\s*\})(?![a-zA-Z])")
_SEMICOLONS = re.compile(r"[(\[][^,]*;[^,]*[)\]]")
_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+)")
_FRACTION = re.compile(r"([+-]?)\s*(?:\\frac\{([+-]?\d+)\}\{(\d+)\}|\\frac(\d)(\d)|([+-]?\d+)/(\d+))")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*[A-Za-z]")
_FUNCTIONS = "sin cos tan cot sec csc log ln exp sqrt max min gcd lcm det arcsin arccos arctan inf pi"
_MATH_WORDS = frozenset(_FUNCTIONS.split())
_CHOICE = re.compile(r"\(?([A-Z])\)?")


@dataclass(frozen=True, slots=True)
class Extracted:
    """The answer of a response, or None with the reason in `detail`."""

    answer: str | None
    detail: str = ""


def extract_answer(response: str) -> Extracted:
    """The last `\\boxed{}` inside the last closed `<answer>` of a response (paper section 2.2)."""
    if "<answer>" not in response:
        return Extracted(None, "no_answer_tag")
    tags = _ANSWER.findall(response)
    if not tags:
        return Extracted(None, "no_answer_tag")
    answer = last_boxed(tags[-1])
    return Extracted(None, "no_box") if answer is None else Extracted(answer)


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


def normalise(answer: str) -> str:
    """One spelling for answers that differ only in LaTeX noise. Brackets keep their meaning and stay."""
    text = answer.strip().replace("\u2212", "-").replace("\u2013", "-").replace("\\$", "").replace("$", "")
    text = text.replace("\\%", "%").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = _NOISE.sub("", text)
    for _ in range(3):  # nested \text
        text, count = _WRAPPED.subn(r" \1 ", text)
        if not count:
            break
    text = text.replace("\\langle", "(").replace("\\rangle", ")")
    text = _NOT_EQUAL.sub(r"\\ne ", text)
    text = _NATURAL_LOG.sub(r"\\ln ", text)
    text = _DEGREE.sub("", text)
    text = _THOUSANDS.sub(lambda m: re.sub(r"[^\d]", "", m.group()), text)
    text = _SPACES.sub(" ", text).strip().rstrip(".").strip()
    while len(text) > 1 and text[0] == "{" and text[-1] == "}" and _closes_at_end(text):
        text = text[1:-1].strip()
    return text.replace(";", ",") if _SEMICOLONS.fullmatch(text) else text


def _closes_at_end(text: str) -> bool:
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return i == len(text) - 1
    return False


def split_unit(text: str) -> tuple[str, str]:
    """("5", "cm") for "5 cm", ("50", "%") for "50%", (text, "") without a known unit."""
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    match = _TRAILING_UNIT.match(text) if len(text) < 200 else None
    if match:
        words = match.group("unit").lower().split()
        if words and all(word in UNITS for word in words):
            unit = text[match.end("value") :].strip().lower().replace("{", "").replace("}", "")
            return match.group("value").strip(), "%" if unit == "percent" else unit
    return text, ""


def plain_number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction of integers or mixed number; None for anything else."""
    if len(text) > 300:  # huge numbers are left to the killable worker
        return None
    if mixed := _MIXED.fullmatch(text):
        sign, whole, top, bottom = mixed.groups()
        value = None if int(bottom) == 0 else int(whole) + Fraction(int(top), int(bottom))
        return -value if value is not None and sign == "-" else value
    if _SPACED_DIGITS.fullmatch(text) and not _SPACED_THOUSANDS.fullmatch(text):
        return None
    text = text.replace(" ", "")
    if _INTEGER.fullmatch(text):
        return Fraction(int(text))
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    match = _FRACTION.fullmatch(text)
    if match:
        sign, *parts = match.groups()
        top, bottom = (int(part) for part in parts if part is not None)
        return None if bottom == 0 else Fraction(-top if sign == "-" else top, bottom)
    return None


def is_word(text: str) -> bool:
    """Whether it is a text answer ("Monday", "no solution"); algebra would read it as a product of letters."""
    if not _WORDS.fullmatch(text):
        return False
    words = text.lower().split()
    return max(map(len, words)) >= 3 and not any(word in _MATH_WORDS for word in words)


def quick_verdict(answer: str, solution: str) -> bool | None:
    """Whether the answers are equal, by text and exact numbers; None where algebra is needed."""
    ours, theirs = normalise(answer), normalise(solution)
    if not ours:
        return False
    if ours == theirs:
        return True
    if (our_choice := _CHOICE.fullmatch(ours)) and (their_choice := _CHOICE.fullmatch(theirs)):
        return our_choice.group(1) == their_choice.group(1)
    if is_word(ours) or is_word(theirs):
        return _as_words(ours) == _as_words(theirs)
    if (same := _same_in_base(ours, theirs)) is not None:
        return same
    (our_value, our_unit), (their_value, their_unit) = split_unit(ours), split_unit(theirs)
    if our_unit and their_unit and _canonical(our_unit) != _canonical(their_unit):
        return False
    if _is_set(ours) != _is_set(theirs) and _is_bracketed(ours) and _is_bracketed(theirs):
        return False  # {1, 2} is neither a point nor an interval
    a, b = plain_number(our_value), plain_number(their_value)
    if a is None or b is None:
        if (a is None) != (b is None) and _is_no_number(our_value if a is None else their_value):
            return False
        return None
    if our_unit == "%" and not their_unit:
        return a == b * 100
    if their_unit == "%" and not our_unit:
        return b in (a, a * 100)
    return a == b


def _is_no_number(text: str) -> bool:
    """Whether it cannot equal a plain number: digits apart, as 4 2, or a relation, as > 5."""
    apart = _SPACED_DIGITS.fullmatch(text) and not _SPACED_THOUSANDS.fullmatch(text)
    return bool(apart or _RELATION.search(text))


def _same_in_base(ours: str, theirs: str) -> bool | None:
    """Whether numbers are equal where one names its base; None when none does.

    A solution's base may be left out, as a unit may; one that only the answer names is another number.
    """
    our_match, their_match = IN_BASE.fullmatch(ours), IN_BASE.fullmatch(theirs)
    if our_match is None and their_match is None:
        return None
    if their_match is None:
        return False if plain_number(theirs) is not None else None
    digits, base = their_match.groups()
    if our_match is None:
        return ours.casefold() == digits.casefold()
    return in_base(*our_match.groups()) == in_base(digits, base)


def in_base(digits: str, base: str) -> int | tuple[str, str]:
    """The value, or the text where no such number is."""
    try:
        return int(digits, int(base)) if len(digits) < 300 and 2 <= int(base) <= 36 else (digits, base)
    except ValueError:
        return digits.casefold(), base


def is_balanced(text: str) -> bool:
    """Whether all braces are balanced; escaped braces do not count."""
    depth = 0
    for brace in _BRACE.findall(text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def _is_set(text: str) -> bool:
    return text.startswith("\\{") and text.endswith("\\}")


def _is_bracketed(text: str) -> bool:
    return "," in text and (_is_set(text) or (text[0] in "([" and text[-1] in ")]"))


def _canonical(unit: str) -> str:
    """One name for a unit: `hours` and `hrs` are `h`."""
    words = (word.rstrip("s") or word for word in re.sub(r"[.^]", " ", unit).split())
    return " ".join(UNIT_ALIASES.get(word, word) for word in words)


def _as_words(text: str) -> str:
    return re.sub(r"[\s\-]+", " ", text).strip(" ().").casefold()
