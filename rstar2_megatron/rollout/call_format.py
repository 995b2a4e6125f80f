"""The formats in which models write tool calls, beside the Hermes one of `tool_call.py`.

As there, any text parses to a list of typed calls, nothing raises, and a call that is broken, cut or unknown carries a
message of ours. An engine's own detectors give no reason for a call that they drop, and take a cut one as complete.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from rstar2_megatron.data.json_text import DECODER, json_type
from rstar2_megatron.rollout.tool_call import (
    CLOSE,
    OPEN,
    CallStatus,
    ParsedCall,
    bad_json,
    check_body,
    check_call,
    parse_tool_calls,
    quote,
    refused,
    unclosed,
)
from rstar2_megatron.tools import ToolSchema, tool_name

Parser = Callable[[str, Sequence[ToolSchema]], list[ParsedCall]]

# ------------------------------------------------------------------------------------------- qwen3_coder

_XML_FORM = f"{OPEN}\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n{CLOSE}"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_BARE_FUNCTION = re.compile(r"^[ \t]*<function=[^>\n]*>", re.MULTILINE)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(rf"\s*{CLOSE}")
_WRITTEN_VALUES = {"True": True, "False": False, "None": None}


def _qwen3_coder(text: str, schemas: Sequence[ToolSchema]) -> list[ParsedCall]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    calls: list[ParsedCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        body = start + len(OPEN)
        function = _FUNCTION.match(text, body)
        if function:
            call, position = _xml_call(text, function, schemas)
            calls.append(call)
            continue
        close = text.find(CLOSE, body)
        inside = (text[body:] if close < 0 else text[body:close]).strip()
        position = body  # behind a tag that is prose
        if close < 0 and "<function=".startswith(inside[:10]):
            calls.append(unclosed(CLOSE))
        elif (inside.startswith(("{", "<")) and not inside.startswith(OPEN)) or (close >= 0 and not inside):
            calls.append(refused(CallStatus.BAD_SYNTAX, f"Tool call is not of the form {_XML_FORM}"))
            position = max(body, close)
    if not calls and _BARE_FUNCTION.search(text):
        calls.append(refused(CallStatus.BAD_SYNTAX, f"Tool call lacks {OPEN} before <function=...>."))
    return calls


def _xml_call(text: str, function: re.Match[str], schemas: Sequence[ToolSchema]) -> tuple[ParsedCall, int]:
    """The call, and where the search for the next one goes on."""
    name = function[1].strip()
    known: dict[str, Any] = next((s["function"]["parameters"]["properties"] for s in schemas if tool_name(s) == name), {})
    arguments = {}
    position = function.end()
    while parameter := _PARAMETER.match(text, position):
        key = parameter[1].strip()
        if key in arguments:  # also where a value holds the marks of parameters
            message = f"Tool call gives the parameter {quote(key)} twice; write each once, and no </parameter> in a value."
            close = text.find(CLOSE, position)
            return refused(CallStatus.BAD_SYNTAX, message), close if close >= 0 else len(text)
        arguments[key] = _typed(parameter[2].removeprefix("\n").removesuffix("\n"), known.get(key, {}))
        position = parameter.end()
    for mark, pattern in (("</function>", _FUNCTION_END), (CLOSE, _CALL_END)):
        end = pattern.match(text, position)
        if not end:
            rest = text[position:].strip()
            close = text.find(CLOSE, position)
            after = close if close >= 0 else len(text)
            if not rest or (close < 0 and rest.startswith(("<parameter=", "</"))):
                return unclosed(mark), after
            return refused(CallStatus.BAD_SYNTAX, f"Tool call has {quote(rest)} where a parameter or {mark} is due."), after
        position = end.end()
    return check_call(name, arguments, schemas), position


def _typed(text: str, spec: dict[str, Any]) -> Any:
    """The value of a parameter: text where the schema wants one, else the JSON that the text is."""
    kinds = _kinds(spec, spec.get("$defs", {}))
    if kinds == {"string"}:
        return text
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        value = _WRITTEN_VALUES.get(text.strip(), text)
    fits = kinds & {json_type(value), "integer" if type(value) is int else ""}
    return value if fits or "string" not in kinds else text


def _kinds(spec: Any, defined: dict[str, Any]) -> set[str]:
    """JSON types that a schema allows, one of pydantic for `str | None` or an Enum too; empty where nothing is said.

    `nullable` is not among them: the text null of an optional text stays a text.
    """
    if not isinstance(spec, dict):
        return set()
    kind, name = spec.get("type", []), str(spec.get("$ref", "")).rpartition("/")[2]
    found = {kind} if isinstance(kind, str) else set(kind)
    others = {key: value for key, value in defined.items() if key != name}  # a definition may name itself
    return found.union(*(_kinds(part, others) for part in (*spec.get("anyOf", []), defined.get(name))))


# --------------------------------------------------------------------------------- JSON: llama3 and mistral

_PYTHON_TAG = "<|python_tag|>"
_BARE_JSON = re.compile(r"""\s*\[?\s*\{\s*(?:["']type["']\s*:\s*["']function["']\s*,\s*)?["']?(?:name|function)["']?\s*:""")
_TAG, _TAGGED_JSON = (re.compile(re.escape(_PYTHON_TAG) + before) for before in ("", r"(?=\s*\{)"))
_SEPARATOR = re.compile(r"\s*;?\s*")
_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED_CALL = re.compile(r"\s*+([\w.-]++)(?:\s*+\[CALL_ID\]\s*+\w*+)?(?:\s*+\[ARGS\])?\s*+(?=\{)")


def _llama3(text: str, schemas: Sequence[ToolSchema]) -> list[ParsedCall]:
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, alone in the turn or behind `<|python_tag|>`.

    A member `"type": "function"` before the name is Llama 3.1's own habit.
    """
    tag = _TAGGED_JSON.search(text) or _TAG.search(text)  # another tag is prose
    if tag is None and not _BARE_JSON.match(text):
        return []
    position = 0 if tag is None else tag.end()
    calls: list[ParsedCall] = []
    while position < len(text) or not calls:
        value, position = _json_at(text, position)
        if isinstance(value, ParsedCall):
            return [*calls, value]
        key = "arguments" if isinstance(value, dict) and "parameters" not in value and "arguments" in value else "parameters"
        calls.append(check_body(value, schemas, key))
        position = _SEPARATOR.match(text, position).end()  # type: ignore[union-attr]  # it matches everywhere
        if text.startswith(_PYTHON_TAG, position):
            position += len(_PYTHON_TAG)
        elif not text.startswith("{", position) and position < len(text):
            return [*calls[:-1], _text_after(text[position:])]
    return calls


def _mistral(text: str, schemas: Sequence[ToolSchema]) -> list[ParsedCall]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    calls: list[ParsedCall] = []
    position = text.find(_TOOL_CALLS)
    while position >= 0:
        position += len(_TOOL_CALLS)
        named = _NAMED_CALL.match(text, position)
        again = text.find(_TOOL_CALLS, position)
        if again >= 0 and named is None and text[position:].lstrip()[:1] not in ("[", "{"):  # the mark is prose
            position = again
            continue
        value, position = _json_at(text, named.end() if named else position)
        if isinstance(value, ParsedCall):
            return [*calls, value]
        if named:
            calls.append(check_body({"name": named[1], "arguments": value}, schemas))
        elif isinstance(value, list) and value:
            calls += [check_body(one, schemas) for one in value]
        else:
            message = f"Behind {_TOOL_CALLS} a list of calls is due, or a name, [ARGS] and a JSON object."
            calls.append(refused(CallStatus.BAD_JSON, message))
        rest = text[position:].lstrip()
        if rest and not rest.startswith(_TOOL_CALLS):
            return [*calls[:-1], _text_after(rest)]
        position = text.find(_TOOL_CALLS, position)
    return calls


def _json_at(text: str, position: int) -> tuple[Any, int]:
    """The JSON value behind white space and where it ends; a ParsedCall when there is none."""
    start = position + len(text[position:]) - len(text[position:].lstrip())
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        cut = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        )
        if cut:
            return refused(CallStatus.UNCLOSED, "Tool call is not complete: the turn ended inside its JSON."), len(text)
        return bad_json(error, start), len(text)


def _text_after(rest: str) -> ParsedCall:
    return refused(CallStatus.BAD_JSON, f"Tool call has text after its JSON: {quote(rest)}; end the turn with the call.")


# ----------------------------------------------------------------------------------------------- pythonic

_LIST_OF_CALLS = re.compile(r"^[ \t]*(\[\s*([A-Za-z_][\w.]*)\s*\()", re.MULTILINE)
_MARKS = ("<|python_start|>", "<|python_end|>")


def _pythonic(text: str, schemas: Sequence[ToolSchema]) -> list[ParsedCall]:
    """`[name(key=value), ...]`, which ends the turn. Elsewhere than at its beginning, the first name must be a tool's."""
    for mark in _MARKS:
        text = text.replace(mark, "")
    names = [tool_name(schema) for schema in schemas]
    for found in _LIST_OF_CALLS.finditer(text):
        if found[2] in names or not text[: found.start()].strip():
            return _python_calls(text[found.start(1) :].rstrip(), schemas)
    return []


def _python_calls(text: str, schemas: Sequence[ToolSchema]) -> list[ParsedCall]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of backslashes in strings
            tree = ast.parse(text, mode="eval").body
        if isinstance(tree, ast.List):
            return [_python_call(element, schemas) for element in tree.elts]
    except SyntaxError as error:
        where = f"in line {error.lineno}"
        if error.msg.startswith("unterminated string") and (text.endswith("]") or (error.lineno or 1) <= text.count("\n")):
            remedy = "inside it write \\n for a line end, \\' or \\\" for a quote"
            return [refused(CallStatus.BAD_SYNTAX, f"Tool call has a string {where} that does not end; {remedy}.")]
        if "was never closed" in error.msg or "unterminated" in error.msg:
            return [unclosed("]")]
        message = f"Tool call is not a Python list of calls: {error.msg} {where}; end the turn with the list."
        return [refused(CallStatus.BAD_SYNTAX, message)]
    except (ValueError, RecursionError, MemoryError) as error:
        return [refused(CallStatus.BAD_SYNTAX, f"Tool call is not a Python list of calls: {error}.")]
    return [refused(CallStatus.BAD_SYNTAX, "Tool call has text after its list; end the turn with the list.")]


def _python_call(node: ast.expr, schemas: Sequence[ToolSchema]) -> ParsedCall:
    if not isinstance(node, ast.Call):
        return refused(CallStatus.BAD_SYNTAX, f"In the list of calls, {quote(ast.unparse(node))} is no call.")
    name, arguments = ast.unparse(node.func), {}
    if node.args or any(one.arg is None for one in node.keywords):
        return refused(CallStatus.BAD_ARGUMENTS, f"Write every argument of {quote(name)} as key=value.", name)
    for one in node.keywords:
        if one.arg in arguments:
            message = f'Tool call gives the argument "{one.arg}" twice; write each once.'
            return refused(CallStatus.BAD_ARGUMENTS, message, name)
        try:
            value = ast.literal_eval(one.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            message = f'Argument "{one.arg}" must be written out as a value, got {quote(ast.unparse(one.value))}.'
            return refused(CallStatus.BAD_ARGUMENTS, message, name)
        arguments[str(one.arg)] = list(value) if isinstance(value, tuple) else value
    return check_call(name, arguments, schemas)


PARSERS: dict[str, Parser] = {
    "hermes": parse_tool_calls,
    "qwen3_coder": _qwen3_coder,
    "llama3": _llama3,
    "pythonic": _pythonic,
    "mistral": _mistral,
}
