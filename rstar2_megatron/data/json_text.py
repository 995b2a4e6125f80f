"""What is wrong with a JSON text or with a value of one, in words for people and for models. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_REMEDIES = {
    "Invalid \\escape": "write a backslash inside a string as \\\\",
    "Unterminated string": 'end the string by "',
    "Expecting ',' delimiter": 'write a " inside a string as \\", and commas between values',
    "Expecting property name": "write names in double quotes, and no comma behind the last value",
    "Expecting value": "write strings in double quotes, and true, false or null",
}
_ESCAPES = {"\n": ("line end", "\\n"), "\r": ("line end", "\\r"), "\t": ("tab", "\\t")}
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "string": (str,),
    "object": (dict,),
    "array": (list,),
    "integer": (int,),
    "number": (int, float),
}


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\t(?=imes|ext\{|heta\b|riangle)|\r(?=ho\b|ight\b)")
"""All but tab and line ends: no reader sees them, and most are a backslash of LaTeX that JSON has read; so are tab and carriage
return before the rest of its words.
"""
BLANKS = " \t\r\n"
"""What is stripped of a text. `str.strip` also takes a form feed, which is the \\f of a \\frac."""


class DoubledKey(ValueError):
    """An object has a key twice."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise DoubledKey(f"the key {next(name for name in found if names.count(name) > 1)!r} stands twice in an object")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_each_once)
"""Raises ValueError, also for a key that stands twice, of which json.loads takes the last one."""
load_json = DECODER.decode


def json_fault(error: ValueError | RecursionError, start: int = 0, unit: str = "character") -> tuple[str, str]:
    """(what is wrong and where, what to write instead). Characters count from 0 at `start`, columns from 1."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply", "nest it less"
    if isinstance(error, DoubledKey):
        return str(error), "write it once"
    if not isinstance(error, json.JSONDecodeError):
        return "a number has too many digits", "write it as a string"
    if unit == "column" and error.doc.lstrip().startswith("{") and not error.doc[error.pos :].strip():
        return "the line ends before its object", "write one whole JSON object a line"
    place = f"{unit} {error.colno if unit == 'column' else error.pos - start}"
    if error.msg.startswith("Invalid control character"):
        raw = error.doc[error.pos]
        name, escape = _ESCAPES.get(raw, (f"control character U+{ord(raw):04X}", f"\\u{ord(raw):04x}"))
        return f"a raw {name} inside a string at {place}", f"write {escape} in its place"
    remedy = next((text for begin, text in _REMEDIES.items() if error.msg.startswith(begin)), "")
    if error.msg == "Expecting ',' delimiter" and error.doc[error.pos : error.pos + 1] in ("", "<"):  # of </tool_call>
        remedy = "close each { and [ that is open"
    if not remedy or error.pos == start:
        remedy = "write one JSON object" + (" a line" if unit == "column" else "")
    return f"{error.msg.removesuffix(' at')} at {place}", remedy


def json_type(value: Any) -> str:
    """JSON's name of a value's type."""
    names = (name for name in JSON_TYPES if name != "integer" and isinstance(value, JSON_TYPES[name]))
    return "null" if value is None else next(names, type(value).__name__)


def half_character(text: str) -> str:
    """What is wrong with a text that cannot be encoded, and so not be tokenised; "" when it can."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair (U+{ord(text[error.start]):04X}), which is no character; remove it"
    return ""


def unreadable(text: str, controls: re.Pattern[str] = CONTROL) -> str:
    """The character that no tokenizer takes, or no reader sees, and the remedy; "" when there is none."""
    if control := controls.search(text):
        remedy = "write LaTeX's backslash as \\\\" if control[0] in "\b\f\t\r" else "remove it"
        return f"the control character U+{ord(control[0]):04X}, which no reader sees; {remedy}"
    return half_character(text)


def exact_number(value: Any) -> bool:
    """Whether a number is the one that was written: no boolean, not NaN, and no float that has lost digits of an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or (math.isfinite(value) and abs(value) < 2**53)
