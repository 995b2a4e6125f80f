"""Conversations rendered for supervised fine-tuning: (text, trained) segments in the project's format.

Roles, tool schemas, tool calls and tool responses look as they do in rollouts (`rollout/chat.py`). An assistant's turn with
reasoning begins with the generation prefix `<reason>`, as there; one without begins without it, because an empty reasoning
block would teach the model to skip reasoning. Only the assistant's turns are trained, each with the token that ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_megatron.data.conversation import Message, call_fault, read_message, read_tools, rendered_tools
from rstar2_megatron.data.json_text import half_character, json_type
from rstar2_megatron.rollout.chat import GENERATION_PREFIX, TOOLS_PROMPT, TURN_END, TURN_START, defuse
from rstar2_megatron.rollout.tool_call import CLOSE, OPEN, CallStatus, parse_tool_calls

Segments = list[tuple[str, int]]


def render_conversation(messages: Sequence[Any], tools: Any = None) -> Segments:
    """Segments whose texts join to the conversation. Raises ValueError, which counts messages from 1."""
    schemas = read_tools(tools)
    read: list[Message] = []
    for number, raw in enumerate(messages, 1):
        try:
            read.append(_checked(read_message(raw), schemas, first=number == 1))
        except ValueError as error:
            raise ValueError(f"message {number} of {len(messages)} {error}") from None
    segments: Segments = []
    untrained = ""
    system = read[0].content if read and read[0].role == "system" else ""
    if schemas:
        described = TOOLS_PROMPT.replace("{tools}", rendered_tools(schemas))
        system = f"{system}\n\n{described}" if system else described
    if system:
        untrained += f"{TURN_START}system\n{defuse(system)}{TURN_END}\n"
    for number, message in enumerate(read):
        if message.role == "assistant":
            opening = GENERATION_PREFIX if message.reasoning else f"{TURN_START}assistant\n"
            segments += [(untrained + opening, 0), (_assistant_text(message) + TURN_END, 1)]
            untrained = "\n"
        elif message.role == "tool":
            response = f"<tool_response>\n{defuse(message.content)}\n</tool_response>"
            first = number == 0 or read[number - 1].role != "tool"
            last = number + 1 == len(read) or read[number + 1].role != "tool"
            untrained += (f"{TURN_START}user\n" if first else "\n") + response + (f"{TURN_END}\n" if last else "")
        elif message.role == "user":
            untrained += f"{TURN_START}user\n{defuse(message.content)}{TURN_END}\n"
    return segments


def _checked(message: Message, tools: list[dict[str, Any]], *, first: bool) -> Message:
    """The message. A call that a rollout refuses is refused, in tool_calls and in the text: the model would learn an error."""
    if message.role == "system" and not first:
        raise ValueError("is a system message; it must be the first")
    for call in message.calls if tools else ():
        if fault := call_fault(call.name, call.arguments, tools):
            raise ValueError(f"{fault}: {call.name!r}")
    if message.role == "assistant" and OPEN in message.content:
        for written in parse_tool_calls(message.content, ()):
            if written.status is not CallStatus.UNKNOWN_TOOL or not written.name:  # every tool is unknown here
                raise ValueError(f"writes a call that a rollout refuses: {written.message}")
    return message


def _assistant_text(message: Message) -> str:
    parts = [f"{message.reasoning}</reason>"] if message.reasoning else []
    parts += [message.content] if message.content else []
    return "\n".join([*parts, *(f"{OPEN}\n{call.body}\n{CLOSE}" for call in message.calls)])


def row_segments(row: Mapping[str, Any]) -> Segments:
    """Segments of a data row, {"segments": [[text, trained], ...]} or {"messages": [...], "tools": [...]}.

    Raises ValueError for a row of another shape.
    """
    given = [key for key in ("segments", "messages", "system", "functions") if row.get(key) is not None]
    if given not in (["segments"], ["messages"]) or not isinstance(row[given[0]], list):
        raise ValueError(
            'expected {"messages": [...], "tools": [...]} or {"segments": [[text, 0 or 1], ...]}, got '
            + (" and ".join(f"{key!r} of type {json_type(row[key])}" for key in given) or "neither 'segments' nor 'messages'")
            + "; a system text is the first message, and functions are tools"
        )
    if given == ["messages"]:
        return render_conversation(row["messages"], row.get("tools"))
    return [_segment(segment, number) for number, segment in enumerate(row["segments"], 1)]


def _segment(segment: Any, number: int) -> tuple[str, int]:
    match segment:
        case [str(text), (0 | 1) as trained]:
            if fault := half_character(text):  # U+0000 may stand in a rollout's own text
                raise ValueError(f"segment {number} has {fault}")
            return text, int(trained)
    raise ValueError(f"segment {number} must be [text, 0 or 1], got {segment!r:.80}")
