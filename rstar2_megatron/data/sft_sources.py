"""Forms of public conversation sets, and how a row of each becomes one conversation with JSON tool calls.

| source | what | on the hub | rows in the paper |
|---|---|---|---|
| toolace | function calling | Team-ACE/ToolACE | 11 K |
| apigen-mt | function calling, many turns | Salesforce/APIGen-MT-5k | 5 K |
| glaive | function calling | glaiveai/glaive-function-calling-v2 | 101 K |
| magicoder | Python, as a call of the Python tool | ise-uiuc/Magicoder-OSS-Instruct-75K | 48 K |
| tulu3 | instructions (the paper rewrote the answers) | allenai/tulu-3-sft-mixture | 30 K |
| nemotron | chat (the paper rewrote the answers) | nvidia/Llama-Nemotron-Post-Training-Dataset: chat | 27 K |

A conversation is {"messages": [...], "tools": [...], "source": name}; a message has `role` (system, user, assistant,
tool), `content`, and an assistant's may have `tool_calls`: [{"name": ..., "arguments": {...}}].
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rstar2_megatron.data.call_arguments import is_call_as_text
from rstar2_megatron.data.conversation import call_fault, read_message, read_tools, rendered_tools, role_and_text
from rstar2_megatron.data.json_text import BLANKS, load_json
from rstar2_megatron.data.rows import HubName, Row, Source, Unusable
from rstar2_megatron.data.tool_text import json_call, json_values, python_calls, tool_schema
from rstar2_megatron.tools import STANDARD_IO, TOOL_SCHEMAS

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SFTSource(Source):
    unreadable: str = "tool call or schema cannot be read"
    count: int = 0
    """Conversations in the paper's mixture (arXiv 2508.20722, section 3.1)."""

    def parse(self, row: Row) -> dict[str, Any]:
        """A conversation. Raises Unusable with a reason, or DataError for a row of another shape."""
        try:
            messages, tools = Source.parse(self, row)
        except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise Unusable(f"not as {self.name} writes its rows ({type(error).__name__}: {error})") from error
        check_conversation(messages, tools)
        return {"messages": messages, "tools": tools, "source": self.name}


def check_conversation(messages: list[Message], tools: list[dict[str, Any]]) -> None:
    """Raises Unusable for a conversation that breaks the format."""
    try:
        rendered_tools(read_tools(tools))
        read = [read_message(message) for message in messages]
    except ValueError as error:
        raise Unusable(f"not read in training: {error}") from error
    roles = [message.role for message in read]
    if "user" not in roles or roles[-1] != "assistant":
        raise Unusable("does not end with the assistant")
    called, names = False, [tool["function"]["name"] for tool in tools]
    for previous, message in zip(["", *roles], read):
        if message.role == "system" and previous:
            raise Unusable("system message in the middle")
        if message.role == previous == "assistant":
            raise Unusable("two assistant turns in a row")
        if message.role == "assistant" and ("<tool_call>" in message.content or is_call_as_text(message.content, names)):
            raise Unusable("a call in the text of an assistant turn")
        if message.role != "tool":
            called = bool(message.calls)
        elif not called:
            raise Unusable("tool response without a call")
        for fault, _ in (call_fault(call.name, call.arguments, tools) for call in message.calls):
            if fault:
                raise Unusable(fault)


def _message(role: str, content: Any) -> Message:
    return _plain({"role": role, "content": content})


def _plain(message: Any) -> Message:
    """A message that is its text alone. Raises Unusable for one that says something else."""
    try:
        role, text = role_and_text(message)
    except ValueError as error:
        raise Unusable(f"not read in training: {error}") from error
    return {"role": role, "content": text.strip(BLANKS)}


_TIME = re.compile(r"(?:The current (?:time|date) is|Today is)\b(?:[^.\n]|\.(?=\s?[a-z\d]|M\b))*")  # a.m. ends no sentence


def _read_toolace(values: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    functions = next((v for v in json_values(values["system"]) if isinstance(v, list) and v), [])
    tools = list(map(tool_schema, functions))
    # Of the instructions only the time is not the set's own, and calls take their dates from it.
    times = _TIME.findall(re.split(r"\[\s*\{", values["system"], maxsplit=1)[0])
    messages = [_message("system", "\n".join(times))] if times else []
    for turn in values["conversations"]:
        role, text = turn["from"], turn["value"]
        if role == "assistant" and re.match(r"\[\s*[^\s\[{(\"'][^(\[\]{]*\(", text.strip()):
            messages.append({"role": "assistant", "content": "", "tool_calls": python_calls(text)})
        else:
            messages.append(_message(role, text))
    return messages, tools


_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}


def _read_apigen(values: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    given = values["tools"]
    tools = [tool_schema(f) for f in (load_json(given) if isinstance(given, str) else given)]
    system = values.get("system")
    messages = [_message("system", system)] if system else []
    for turn in values["conversations"]:
        if turn["from"] == "function_call":
            messages.append({"role": "assistant", "content": "", "tool_calls": [json_call(turn["value"])]})
        else:
            messages.append(_message(_SHAREGPT[turn["from"]], turn["value"]))
    return messages, tools


_GLAIVE_TURN = re.compile(r"^[ \t]*+(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*", re.MULTILINE)
_GLAIVE_OWN = re.compile(r"SYSTEM:|You are a helpful assistant,? with (no )?access to [\w ]{1,60}\.( Use them if required -)?")
_GLAIVE_ROLE = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def _read_glaive(values: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    tools = [tool_schema(v) for v in json_values(values["system"]) if isinstance(v, dict) and "name" in v]
    before, *parts = _GLAIVE_TURN.split(values["chat"].replace("<|endoftext|>", ""))
    system = (_GLAIVE_OWN.sub("", re.split(r'\{\s*"', values["system"], maxsplit=1)[0]) + before).strip()
    messages = [_message("system", system)] if system else []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        message = _message(_GLAIVE_ROLE[speaker], text)
        if message["role"] == "assistant" and "<functioncall>" in message["content"]:
            content, _, call = message["content"].partition("<functioncall>")
            message = {"role": "assistant", "content": content.strip(), "tool_calls": [json_call(call.strip())]}
        messages.append(message)
    return messages, tools


_PYTHON_BLOCK = re.compile(r"```python[^\n]*\n(.*?)```", re.DOTALL)


def _read_magicoder(values: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """The solution's program becomes a call of the Python tool, so that the model learns to write code in JSON."""
    if values.get("lang") not in (None, "python"):
        raise Unusable("not Python")
    problem = values.get("problem") or values.get("instruction")
    solution = values.get("solution") or values.get("response")
    if not isinstance(problem, str) or not isinstance(solution, str):
        raise Unusable("no problem or no solution")
    blocks = _PYTHON_BLOCK.findall(solution)
    if len(blocks) != 1:
        raise Unusable("not one Python program")
    code = blocks[0].strip("\n")
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unusable("not one Python program") from None
    before = solution.partition("```")[0].strip()
    call = {"name": STANDARD_IO, "arguments": {"code": code, "input": ""}}
    return (
        [_message("user", problem), {"role": "assistant", "content": before, "tool_calls": [call]}],
        [TOOL_SCHEMAS[STANDARD_IO]],
    )


def _read_messages(values: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    return [_plain(message) for message in values["messages"]], []


def _read_nemotron(values: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """Only answers without reasoning, as in the paper's SFT."""
    if values.get("reasoning") == "on":
        raise Unusable("a reasoning answer")
    given = values["input"]
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [_plain(turn) for turn in turns]
    output = re.sub(r"\A\s*<think>.*?</think>\s*", "", values["output"], flags=re.DOTALL)
    if "<think>" in output:
        raise Unusable("a reasoning answer")
    # Of the system text the switch of reasoning is the set's own. Another system text makes the row unusable.
    system = _message("system", re.sub(r"\bdetailed thinking (?:on|off)\b\.?", "", values.get("system_prompt") or ""))
    messages = [system, *(one for one in messages if one != system), _message("assistant", output)]
    return [one for one in messages if one["content"] or one["role"] != "system"], []


_APIGEN = HubName("Salesforce/APIGen-MT-5k")
_MAGICODER = HubName("ise-uiuc/Magicoder-OSS-Instruct-75K")
_MAGICODER_COLUMNS = ("lang", "problem", "solution", "instruction", "response")
_NEMOTRON = HubName("nvidia/Llama-Nemotron-Post-Training-Dataset", "SFT", "chat")
SFT_SOURCES: dict[str, SFTSource] = {
    source.name: source
    for source in (
        SFTSource("toolace", ("system", "conversations"), _read_toolace, HubName("Team-ACE/ToolACE"), count=11_000),
        SFTSource("apigen-mt", ("conversations", "tools"), _read_apigen, _APIGEN, ("system",), count=5_000),
        SFTSource("glaive", ("system", "chat"), _read_glaive, HubName("glaiveai/glaive-function-calling-v2"), count=101_000),
        SFTSource("magicoder", (), _read_magicoder, _MAGICODER, _MAGICODER_COLUMNS, count=48_000),
        SFTSource("tulu3", ("messages",), _read_messages, HubName("allenai/tulu-3-sft-mixture"), count=30_000),
        SFTSource("nemotron", ("input", "output"), _read_nemotron, _NEMOTRON, ("reasoning", "system_prompt"), count=27_000),
    )
}
