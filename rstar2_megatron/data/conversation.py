"""Conversations as rows bring them: what their values mean, and a sentence for what is refused. Pure.

`docs/inputs.md` lists the forms. A value is converted where only one meaning is possible, and refused otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from rstar2_megatron.data.call_arguments import argument_fault
from rstar2_megatron.data.json_text import CONTROL, DoubledKey, half_character, json_type, load_json, unreadable
from rstar2_megatron.tools import ToolSchema, render_schemas

ROLES = ("system", "user", "assistant", "tool")
CONTROL_TOKEN = re.compile(r"<\|[^\s<>|]+\|>")
"""Control tokens of chat formats, such as <|im_end|>; the `<|` of `1<|z|<2` is none."""
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)  # reasoning as DeepSeek-R1 and Qwen3 write it
_THINK = re.compile(r"</?think>")
_READ = frozenset({"role", "content", "id", "name", "tool_call_id"})  # the last three are not written for a model
_ASSISTANTS = _READ | {"reasoning_content", "tool_calls"}
_RENDERED = re.compile(  # not the HTML <s>, nor a question about [INST]
    r"(?s)\s*(?:<\|(?:im_start|begin_of_text|start_header_id|system|user|start)\|>|\[gMASK\]|<\uff5c\w|"
    r"<(?:s|bos)>\s*(?=\[I|<[|s])|<start_of_turn>|\[INST\](?=.*\[/INST))"
)
_DRESSED = re.compile(r"\s*<tool_response>((?:(?!</?tool_response>).)*)</tool_response>\s*", re.DOTALL)
_RESPONSES = re.compile(r"\s*<tool_response>.*</tool_response>\s*", re.DOTALL)
_NUL = re.compile("\0")
_EMPTY: tuple[Any, ...] = (None, "", [], {})


class Call(NamedTuple):
    """A tool call, and its JSON as the model writes it."""

    name: str
    arguments: dict[str, Any]
    body: str
    call_id: str = ""


class Message(NamedTuple):
    role: str
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    """Of a tool's result: the `id` of its call."""


def role_and_text(raw: Any, read: frozenset[str] = _READ) -> tuple[str, str]:
    """Role and content of a message that says nothing in other keys than `read`.

    Raises ValueError whose text goes on from the name of the message: "has ...".
    """
    role = raw.get("role") if isinstance(raw, dict) else None
    if role not in ROLES:
        given = f"has role {role!r}" if isinstance(raw, dict) else f"is of type {json_type(raw)}"
        raise ValueError(f"{given}, expected an object with the role {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    for key in sorted(raw.keys() - read):
        if raw[key] not in _EMPTY:
            raise ValueError(
                f"has the key {key!r}, which is not read: an assistant's calls are read from tool_calls, its reasoning from "
                "reasoning_content, of SFT rows only; write it there, or remove it"
            )
    content = raw.get("content")
    if content is None and any(raw.get(key) for key in read - _READ):
        content = ""  # of a turn that only calls
    text = content_text(content, role)
    if role in ("system", "user") and (found := _RENDERED.match(text)):
        raise ValueError(f"begins with {found[0].strip()}, so a chat template has written it; write its messages instead")
    return role, text


def content_text(content: Any, role: str) -> str:
    """The text of a message's content, which may be in parts; a tool's result may be any value. Raises ValueError."""
    if isinstance(content, str):
        return content
    if content is None:
        raise ValueError("has no content (null or missing); write its text, or remove the message")
    parts = content if isinstance(content, list) else []
    texts: list[Any] = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if role == "tool" and not texts:
        try:
            return json.dumps(content, ensure_ascii=False)
        except TypeError:
            raise ValueError("has content that holds what JSON cannot (a date, bytes); write a text") from None
    if not texts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f'has content of type {json_type(content)}, expected text or [{{"type": "text", "text": ...}}, ...] only'
        )
    return "".join(texts)


def read_message(raw: Any) -> Message:
    """A message of an SFT row. Raises ValueError as `role_and_text`."""
    assistant = isinstance(raw, dict) and raw.get("role") == "assistant"
    role, text = role_and_text(raw, _ASSISTANTS if assistant else _READ)
    reasoning, calls = (raw.get("reasoning_content") or "", _from_text(raw.get("tool_calls")) or []) if assistant else ("", [])
    if not isinstance(reasoning, str) or not isinstance(calls, list):
        raise ValueError("has reasoning_content that is no text, or tool_calls that are no list")
    if assistant and not reasoning and (thought := _THOUGHT.match(text)):
        reasoning, text = thought[1].strip(), text[thought.end() :]
    call_id = _id(raw, "tool_call_id") if role == "tool" else ""
    if role == "tool" and (dressed := _DRESSED.fullmatch(text)):  # as it is rendered
        text = dressed[1].strip()
    elif role in ("tool", "user") and _RESPONSES.fullmatch(text):
        raise ValueError("writes <tool_response> itself; write each result as a message of its own, with the role tool")
    message = Message(role, text, reasoning if reasoning.strip() else "", tuple(map(read_call, calls)), call_id)
    whole = "\n".join([text, reasoning, *(call.body for call in message.calls)]) if assistant else text
    if fault := unreadable(whole, CONTROL if assistant else _NUL):  # the others' texts are not trained: logs, pages of a PDF
        raise ValueError(f"has {fault}")
    if assistant and (found := CONTROL_TOKEN.search(whole)):
        raise ValueError(f"holds {found[0]}, which would be trained as a control token; remove it, or spell it otherwise")
    if assistant and (found := _THINK.search(f"{text}\n{reasoning}")):
        raise ValueError(
            f"holds {found[0]}, which would be trained as an answer; write the reasoning once, as reasoning_content or between "
            "<think> and </think> before all else, and other tags otherwise"
        )
    if assistant and not whole.strip():
        raise ValueError("is empty, which would teach the model to say nothing; remove it")
    return message


def _from_text(value: Any) -> Any:
    """What a JSON text holds; any other value is itself."""
    try:
        return load_json(value.strip() or "{}") if isinstance(value, str) else value
    except DoubledKey as error:
        raise ValueError(f"has JSON in a text in which {error}; write it once") from None
    except (ValueError, RecursionError):
        return value


def read_call(raw: Any) -> Call:
    """A call as this project or OpenAI writes it. Raises ValueError, as `role_and_text`."""
    name, arguments = described(raw).get("name"), _from_text(described(raw).get("arguments"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(
            f"has a call of {name!r} whose arguments are of type {json_type(arguments)}, expected a name and an object, or the "
            'JSON of one: {"name": ..., "arguments": {...}}, alone or under "function"'
        )
    try:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(f"has a call of {name!r} whose arguments hold what JSON cannot (NaN, a date); write a text") from None
    return Call(name, arguments, body, _id(raw, "id"))


def _id(raw: dict[str, Any], key: str) -> str:
    return "" if raw.get(key) is None else str(raw[key])


def read_tools(value: Any) -> list[dict[str, Any]]:
    """The schemas of a row, which may be JSON in a text. Raises ValueError."""
    tools = _from_text(value) or []
    tools = list(map(_from_text, tools)) if isinstance(tools, list) else [{}]
    if not all("name" in one and isinstance(one.get("parameters") or {}, dict) for one in map(described, tools)):
        raise ValueError('has tools that are no list of {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    return tools


def rendered_tools(tools: list[dict[str, Any]]) -> str:
    """As the model reads them. Raises ValueError for a text that no tokenizer takes."""
    text = render_schemas(tools)
    if fault := half_character(text):
        raise ValueError(f"has tools with {fault}")
    return text


def described(raw: Any) -> dict[str, Any]:
    """A function or a call, alone or under "function" as OpenAI writes it; empty for what is no object."""
    inner = raw.get("function") if isinstance(raw, dict) else None
    return inner if isinstance(inner, dict) else raw if isinstance(raw, dict) else {}


def schema_of(tool: Any) -> ToolSchema:
    """The schema of a tool in the whole form by which a rollout checks calls; what it leaves out is not checked."""
    function = described(tool)
    given = function.get("parameters")
    given = given if isinstance(given, dict) else {}
    properties, required = given.get("properties"), given.get("required")
    specs = properties.items() if isinstance(properties, dict) else ()
    parameters = {
        "properties": {key: spec for key, spec in specs if isinstance(spec, dict)},
        "required": [key for key in required if isinstance(key, str)] if isinstance(required, list) else [],
    }
    return {"function": {"name": function["name"], "parameters": parameters}}


def call_fault(name: str, arguments: dict[str, Any], tools: Iterable[Any]) -> tuple[str, str]:
    """Why a rollout with these tools refuses the call, and the particulars of it; or twice ""."""
    schema = next((schema for schema in map(schema_of, tools) if schema["function"]["name"] == name), None)
    if schema is None:
        return "calls a tool that is not described", repr(name)
    fault = argument_fault(arguments, schema)
    return ("makes a call that a rollout refuses" if fault else ""), fault
