"""Conversations rendered for supervised fine-tuning: (text, trained) segments in the project's format.

Roles, tool schemas, tool calls and tool responses look as they do in rollouts (`rollout/chat.py`); an assistant's
turn begins without the generation prefix `<reason>`: this data holds no reasoning, and an empty reasoning
block would teach the model to skip reasoning. Only the assistant's turns are trained, each with the token that ends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_megatron.rollout.chat import TOOLS_PROMPT, TURN_END, TURN_START, defuse
from rstar2_megatron.tools import render_schemas

Segments = list[tuple[str, int]]
_ROLES = ("system", "user", "assistant", "tool")


def render_conversation(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Segments:
    """Segments whose texts join to the conversation. Raises ValueError for a message of another shape."""
    segments: Segments = []
    untrained = ""
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    if tools:
        described = TOOLS_PROMPT.replace("{tools}", render_schemas([dict(tool) for tool in tools]))
        system = f"{system}\n\n{described}" if system else described
    if system:
        untrained += f"{TURN_START}system\n{defuse(system)}{TURN_END}\n"
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise ValueError(f"message {number} has role {role!r}, expected one of {', '.join(_ROLES)}")
        if role == "assistant":
            segments += [(f"{untrained}{TURN_START}assistant\n", 0), (_assistant_text(message) + TURN_END, 1)]
            untrained = "\n"
        elif role == "tool":
            response = f"<tool_response>\n{defuse(str(message['content']))}\n</tool_response>"
            first = number == 0 or messages[number - 1]["role"] != "tool"
            last = number + 1 == len(messages) or messages[number + 1]["role"] != "tool"
            untrained += (f"{TURN_START}user\n" if first else "\n") + response + (f"{TURN_END}\n" if last else "")
        elif role == "user":
            untrained += f"{TURN_START}user\n{defuse(str(message['content']))}{TURN_END}\n"
        elif number:
            raise ValueError(f"message {number} is a system message; it must be the first")
    return segments


def _assistant_text(message: Mapping[str, Any]) -> str:
    parts = [str(message["content"])] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        body = json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def row_segments(row: Any) -> Segments:
    """Segments of a data row, {"segments": [[text, trained], ...]} or {"messages": [...], "tools": [...]}.

    Raises ValueError, KeyError or TypeError for a row of another shape.
    """
    if not isinstance(row, dict):
        raise ValueError("expected an object")
    if "segments" in row:
        return [(str(text), int(trained)) for text, trained in row["segments"]]
    if "messages" not in row:
        raise ValueError("neither 'segments' nor 'messages'")
    return render_conversation(row["messages"], row.get("tools") or ())
