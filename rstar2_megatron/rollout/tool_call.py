"""Reads tool calls out of an assistant turn.

Format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Any text parses to a list of typed calls, and nothing
raises. A call that cannot be run carries a message that tells the model what to fix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rstar2_megatron.data.call_arguments import argument_fault
from rstar2_megatron.data.json_text import DECODER, json_fault, json_type
from rstar2_megatron.tools import ToolSchema, tool_name

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_WHITESPACE = " \t\n\r"
_SHOWN_CHARS = 60  # of a wrong value that is quoted to the model
_MESSAGE_CHARS = 280


class CallStatus(StrEnum):
    VALID = "valid"
    BAD_JSON = "bad_json"  # no JSON object of the right shape between the tags
    BAD_SYNTAX = "bad_syntax"  # in a format that is not JSON
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"  # missing, or of the wrong type
    UNCLOSED = "unclosed"  # the turn ended before the call's end


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


# What follows an opening tag at once: a call's object (or a list, which is a mistake), a line end, or the turn's end.
_LIKE_CALL = re.compile(r"[ \t]*(?:[{\[\r\n]|$)")
# What follows a tag in prose: punctuation that quotes neither JSON nor code, or nothing but words up to the closing tag.
_PROSE = re.compile(r"(?!```|['\"`]\s*[{\[])[`'\".,;:!?)]|[ \t][\w\s,.-]*</tool_call>")


def parse_tool_calls(text: str, schemas: Sequence[ToolSchema]) -> list[ParsedCall]:
    """All calls of one assistant turn, in order; an empty list when there is none.

    Of the opening tags before a closing one the last that begins a well-formed call counts. A tag that nothing like a call
    follows is prose when the turn has a call beside it, or when no tag closes it.
    """
    calls: list[ParsedCall] = []
    others: list[ParsedCall] = []  # between tags, but not like a call
    found: ParsedCall | None = None  # since the last closing tag: the first one like a call, or a well-formed one
    position = text.find(OPEN)
    close = text.find(CLOSE)
    while position >= 0:
        start = position + len(OPEN)
        if 0 <= close < start:
            close = text.find(CLOSE, start)
        call, end = _parse_one(text, start, close, schemas)
        like_call = _LIKE_CALL.match(text, start) is not None
        well_formed = bool(end) and like_call
        if like_call:
            found = call if well_formed else found or call
        position = text.find(OPEN, end if well_formed else start)
        if well_formed or position < 0 or 0 <= close < position:  # no tag is left that could begin the call
            if found is not None:
                calls.append(found)
            elif close >= 0 and not _PROSE.match(text, start):
                others.append(call)
            found = None
    return calls or others


def _parse_one(text: str, start: int, close: int, schemas: Sequence[ToolSchema]) -> tuple[ParsedCall, int]:
    """The call whose body starts at `start`, and where its closing tag ends; 0: the body is not JSON and this tag.

    close: of the next closing tag; -1: there is none.
    """
    while start < len(text) and text[start] in _WHITESPACE:
        start += 1
    try:
        # decode from the front: code inside the JSON string may contain the closing tag
        body, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        if close < 0:
            return unclosed(CLOSE), 0
        return bad_json(error, start), 0
    rest = end
    while rest < len(text) and text[rest] in _WHITESPACE:
        rest += 1
    if text.startswith(CLOSE, rest):
        return check_body(body, schemas), rest + len(CLOSE)
    if close < 0:
        return unclosed(CLOSE), 0
    return refused(CallStatus.BAD_JSON, f"Tool call has text after its JSON object: {quote(text[rest:close])}"), 0


def refused(status: CallStatus, message: str, name: str = "") -> ParsedCall:
    """A call that is not run; the message is cut to a length that a model reads."""
    return ParsedCall(status, name, message=shortened(message, _MESSAGE_CHARS))


def bad_json(error: ValueError | RecursionError, start: int) -> ParsedCall:
    what, remedy = json_fault(error, start)
    return refused(CallStatus.BAD_JSON, f"Tool call is not valid JSON: {what}; {remedy}.")


def unclosed(mark: str) -> ParsedCall:
    return ParsedCall(CallStatus.UNCLOSED, message=f"Tool call was not closed with {mark}.")


def shortened(text: str, limit: int) -> str:
    """The text, or its first words in `limit` characters and "..."; a longer word is cut."""
    if len(text) <= limit:
        return text
    return (text[: limit + 1].rsplit(maxsplit=1) or [""])[0][:limit] + "..."


def check_body(body: Any, schemas: Sequence[ToolSchema], key: str = "arguments") -> ParsedCall:
    """The call of a JSON value that should be an object with "name" and `key`."""
    if not isinstance(body, dict):
        message = f'Tool call must be a JSON object with "name" and "{key}", got {json_type(body)}.'
        return refused(CallStatus.BAD_JSON, message)
    missing = [name for name in ("name", key) if name not in body]
    if missing:
        return refused(CallStatus.BAD_JSON, f"Tool call lacks {_quoted(missing)}.")
    return check_call(body["name"], body[key], schemas, key)


def check_call(name: Any, arguments: Any, schemas: Sequence[ToolSchema], key: str = "arguments") -> ParsedCall:
    """The call of a tool by its name, if there is such a tool and the arguments fit its schema."""
    by_name = {tool_name(schema): schema for schema in schemas}
    if not isinstance(arguments, dict):
        message = f'"{key}" must be a JSON object, got {json_type(arguments)}.'
        return refused(CallStatus.BAD_ARGUMENTS, message, _printable(name) if isinstance(name, str) else "")
    if not isinstance(name, str):
        message = f'"name" must be a string, got {json_type(name)}. Known tools: {_quoted(by_name)}.'
        return refused(CallStatus.UNKNOWN_TOOL, message)
    if name not in by_name:
        message = f"There is no tool {quote(name)}. Known tools: {_quoted(by_name)}."
        return refused(CallStatus.UNKNOWN_TOOL, message, _printable(name))
    if fault := argument_fault(arguments, by_name[name]):
        return refused(CallStatus.BAD_ARGUMENTS, fault, name)
    known = by_name[name]["function"]["parameters"]["properties"]
    return ParsedCall(CallStatus.VALID, name=name, arguments={key: arguments[key] for key in known if key in arguments})


def _quoted(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _printable(text: str) -> str:
    """`text` with lone surrogates replaced, because they cannot be encoded."""
    return text.encode(errors="replace").decode()


def quote(text: str) -> str:
    """A text of the model, shortened and in quotes."""
    return repr(shortened(_printable(text), _SHOWN_CHARS))
