"""Reads tool calls and tool schemas from the texts of public function-calling sets. Pure.

ToolACE writes calls as Python does, `[Get Weather(city="Oslo", days=[1, 2])]`, with names that are not valid in Python;
Glaive writes JSON whose arguments are JSON again between single quotes. A call that cannot be read exactly
raises ValueError, and the conversation is dropped: a guessed argument must not be trained on.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from rstar2_megatron.data.conversation import described, read_call
from rstar2_megatron.data.json_text import DECODER, load_json

Call = dict[str, Any]
# A quote opens a string behind one of these only: an apostrophe inside a name does not.
_MARK = re.compile(r"""(?<=[=,:(\[{])\s*(?:(?P<string>(["'])(?:\\.|(?!\2)[^\\])*\2)|(?P<open>["']))|[()\[\]{},]""", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_NAMES_OF_TYPES = {
    "object": "dict", "number": "float double", "integer": "int long", "string": "str char", "boolean": "bool",
    "array": "list tuple arraylist",
}  # fmt: skip
_TYPES = {name: kind for kind, names in _NAMES_OF_TYPES.items() for name in names.split()}


def python_calls(text: str) -> list[Call]:
    """Calls of `[name(key=value, ...), ...]`. Raises ValueError for anything else."""
    text = text.strip()
    parts = _split(text[1:-1]) if text.startswith("[") and text.endswith("]") else []
    if not parts:
        raise ValueError("not a list of calls")
    return list(map(_python_call, parts))


def _python_call(text: str) -> Call:
    name, parenthesis, rest = text.strip().partition("(")
    if not parenthesis or not rest.endswith(")") or not name.strip():
        raise ValueError(f"not a call: {text[:60]!r}")
    arguments: dict[str, Any] = {}
    for part in _split(rest[:-1]):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"not key=value: {part[:60]!r}")
        if (key := key.strip().strip("'\"")) in arguments:
            raise ValueError(f"the argument {key!r} stands twice")
        arguments[key] = _value(value.strip())
    return {"name": name.strip(), "arguments": arguments}


def _value(text: str) -> Any:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        return load_json(text)
    except json.JSONDecodeError:
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(f"not a literal: {text[:60]!r}") from None
    return value


def _split(text: str) -> list[str]:
    """Parts between commas outside brackets and strings. Raises ValueError when these are unbalanced."""
    parts: list[str] = []
    start = depth = 0
    for mark in _MARK.finditer(text):
        if mark["string"]:
            continue
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if depth < 0 or mark["open"]:
            raise ValueError("a quote or bracket is not closed, or closes nothing")
        if mark[0] == "," and depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    if depth:
        raise ValueError("a bracket is not closed")
    if text[start:].strip() or parts:
        parts.append(text[start:])
    return [part.strip() for part in parts]


def json_call(text: str) -> Call:
    """A call written as JSON, with arguments as an object or as text that holds one. Raises ValueError."""
    try:
        call = load_json(text)
    except json.JSONDecodeError:
        # Glaive: {"name": "f", "arguments": '{"a": "it\'s"}'}
        match = re.fullmatch(r"""\{\s*"name"\s*:\s*("[^"]*")\s*,\s*"arguments"\s*:\s*'(.*)'\s*\}""", text.strip(), re.DOTALL)
        if match is None:
            raise ValueError(f"not a call: {text[:60]!r}") from None
        call = {"name": json.loads(match.group(1)), "arguments": match.group(2).replace("\\'", "'")}
    if isinstance(call, dict):  # arguments under a third name are not none
        call = {"arguments": call.get("parameters", None if call.keys() - {"name"} else {}), **call}
    read = read_call(call)
    return {"name": read.name, "arguments": read.arguments}


def json_values(text: str) -> Iterator[Any]:
    """JSON objects and arrays in a text, in order; braces of prose are none. Raises ValueError at a broken object."""
    position = 0
    while (found := re.compile(r"""\[|\{\s*(?:["'}]|\w+\s*:)""").search(text, position)) is not None:
        try:
            value, position = DECODER.raw_decode(text, found.start())
            yield value
        except ValueError:
            if found[0] != "[":  # a function would be lost, or a part of it taken for one
                raise
            position = found.start() + 1


def tool_schema(function: Any) -> dict[str, Any]:
    """An OpenAI-style schema of a function description, with JSON Schema's names of types. Raises ValueError."""
    function = described(function)
    if not isinstance(function.get("name"), str):
        raise ValueError(f"not a function description: {str(function)[:60]!r}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": str(function.get("description") or ""),
            "parameters": _json_schema(parameters),
        },
    }


def _json_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _TYPES.get(value.lower(), value) if key == "type" and isinstance(value, str) else _json_schema(value)
        for key, value in node.items()
        if value is not None
    }
