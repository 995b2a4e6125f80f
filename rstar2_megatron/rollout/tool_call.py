"""Reads tool calls out of an assistant turn.

Format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Any text parses to a list of typed calls, and nothing
raises. A call that cannot be run carries a message that tells the model what to fix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rstar2_megatron.tools import ToolSchema, required_parameters, tool_name

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_WHITESPACE = " \t\n\r"
_SHOWN_CHARS = 60  # of a wrong value that is quoted to the model


class CallStatus(StrEnum):
    VALID = "valid"
    BAD_JSON = "bad_json"  # no JSON object of the right shape between the tags
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"  # missing, or of the wrong type
    UNCLOSED = "unclosed"  # the turn ended before </tool_call>


@dataclass(slots=True)
class ParsedCall:
    """One call as written. `message` tells the model what is wrong and is empty for a valid call."""

    status: CallStatus
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def valid(self) -> bool:
        return self.status is CallStatus.VALID


def parse_tool_calls(text: str, schemas: Sequence[ToolSchema]) -> list[ParsedCall]:
    """All calls of one assistant turn, in order; an empty list when there is none."""
    calls = []
    position = text.find(OPEN)
    while position >= 0:
        call, end = _parse_one(text, position + len(OPEN), schemas)
        calls.append(call)
        position = text.find(OPEN, end)
    return calls


def _parse_one(text: str, start: int, schemas: Sequence[ToolSchema]) -> tuple[ParsedCall, int]:
    """The call whose body starts at `start`, and the position to search from for the next call."""
    while start < len(text) and text[start] in _WHITESPACE:
        start += 1
    close = text.find(CLOSE, start)
    after = len(text) if close < 0 else close + len(CLOSE)
    try:
        # decode from the front: code inside the JSON string may contain the closing tag
        body, end = json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        return ParsedCall(CallStatus.BAD_JSON, message="Tool call is nested too deeply."), after
    except ValueError as error:
        if close < 0:
            return _unclosed(), after
        reason = _json_reason(error, start)
        return ParsedCall(CallStatus.BAD_JSON, message=f"Tool call is not valid JSON: {reason}"), after
    rest = end
    while rest < len(text) and text[rest] in _WHITESPACE:
        rest += 1
    if not text.startswith(CLOSE, rest):
        if close < 0:
            return _unclosed(), after
        message = f"Tool call has text after its JSON object: {_show(text[rest:close])}"
        return ParsedCall(CallStatus.BAD_JSON, message=message), after
    return _check_call(body, schemas), rest + len(CLOSE)


def _unclosed() -> ParsedCall:
    return ParsedCall(CallStatus.UNCLOSED, message=f"Tool call was not closed with {CLOSE}.")


def _json_reason(error: ValueError, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - start}."
    return f"{str(error)[:_SHOWN_CHARS]}."  # e.g. an integer of too many digits


def _check_call(body: Any, schemas: Sequence[ToolSchema]) -> ParsedCall:
    if not isinstance(body, dict):
        message = f'Tool call must be a JSON object with "name" and "arguments", got {_kind(body)}.'
        return ParsedCall(CallStatus.BAD_JSON, message=message)
    missing = [key for key in ("name", "arguments") if key not in body]
    if missing:
        return ParsedCall(CallStatus.BAD_JSON, message=f"Tool call lacks {_quoted(missing)}.")
    by_name = {tool_name(schema): schema for schema in schemas}
    name, arguments = body["name"], body["arguments"]
    if not isinstance(name, str):
        message = f'"name" must be a string, got {_kind(name)}. Known tools: {_quoted(by_name)}.'
        return ParsedCall(CallStatus.UNKNOWN_TOOL, message=message)
    if name not in by_name:
        message = f"There is no tool {_show(name)}. Known tools: {_quoted(by_name)}."
        return ParsedCall(CallStatus.UNKNOWN_TOOL, name=_printable(name), message=message)
    if not isinstance(arguments, dict):
        message = f'"arguments" must be a JSON object, got {_kind(arguments)}.'
        return ParsedCall(CallStatus.BAD_ARGUMENTS, name=name, message=message)
    problem = _argument_problem(arguments, by_name[name])
    if problem:
        return ParsedCall(CallStatus.BAD_ARGUMENTS, name=name, message=problem)
    known = by_name[name]["function"]["parameters"]["properties"]
    return ParsedCall(CallStatus.VALID, name=name, arguments={key: arguments[key] for key in known if key in arguments})


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def _argument_problem(arguments: dict[str, Any], schema: ToolSchema) -> str:
    """Error in the arguments, or an empty string. Unknown arguments are ignored, as in the released code."""
    missing = [key for key in required_parameters(schema) if key not in arguments]
    if missing:
        return f"{tool_name(schema)} needs the argument {_quoted(missing)}."
    for key, spec in schema["function"]["parameters"]["properties"].items():
        if key not in arguments:
            continue
        value, wanted = arguments[key], spec.get("type", "string")
        wrong_bool = isinstance(value, bool) and wanted != "boolean"
        if wrong_bool or not isinstance(value, _JSON_TYPES[wanted]):
            return f'Argument "{key}" must be of type {wanted}, got {_kind(value)}.'
        if isinstance(value, str) and not _is_unicode(value):
            return f'Argument "{key}" holds half of a surrogate pair, which is no character.'
    return ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    """JSON name of a value's type."""
    if value is None:
        return "null"
    for name in ("boolean", "string", "object", "array", "number"):
        if isinstance(value, _JSON_TYPES[name]):
            return name
    return type(value).__name__


def _quoted(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _printable(text: str) -> str:
    """`text` with lone surrogates replaced, because they cannot be encoded."""
    return text.encode(errors="replace").decode()


def _show(text: str) -> str:
    shown = _printable(text)
    return repr(shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "...")
