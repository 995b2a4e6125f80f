"""Conversations rendered for supervised fine-tuning: (text, trained) segments in the project's format.

Roles, tool schemas, tool calls and tool responses look as they do in rollouts (`rollout/chat.py`). An assistant's turn with
reasoning begins with the generation prefix `<reason>`, as there; one without begins without it, because an empty reasoning
block would teach the model to skip reasoning. Only the assistant's turns are trained, each with the token that ends it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_megatron.data.call_arguments import is_call_as_text
from rstar2_megatron.data.conversation import Message, call_fault, read_message, read_tools, rendered_tools, schema_of
from rstar2_megatron.data.json_text import half_character, json_type
from rstar2_megatron.rollout.chat import GENERATION_PREFIX, TOOLS_PROMPT, TURN_END, TURN_START, defuse
from rstar2_megatron.rollout.tool_call import CLOSE, OPEN, CallStatus, parse_tool_calls
from rstar2_megatron.tools import tool_name

Segments = list[tuple[str, int]]
# Calls as Glaive, Mistral, Qwen3-Coder and DeepSeek write them.
_FOREIGN_CALL = re.compile(r"<functioncall>\s*\{|\[TOOL_CALLS\]\s*(?:\[|\w+\[ARGS)|<function=\w+>\s*[{<]|<\uff5ctool")
_OTHER_FORMS = {  # by a key that only they have
    "conversations": "ShareGPT's turns become messages: from is the role (human: user, gpt: assistant), value the content",
    "output": "Alpaca's instruction with its input becomes a user's message, its output an assistant's",
    "completion": "the prompt becomes a user's message, the completion an assistant's",
}
_KEYS = ("segments", "messages", "system", "system_prompt", "functions", "chat_template_kwargs")


def render_conversation(messages: Sequence[Any], tools: Any = None, specials: re.Pattern[str] | None = None) -> Segments:
    """Segments whose texts join to the conversation. Raises ValueError, which counts messages from 1.

    specials: the tokenizer's control tokens, which only the format may write.
    """
    schemas = read_tools(tools)
    read: list[Message] = []
    for number, raw in enumerate(messages, 1):
        try:
            read.append(_checked(read_message(raw), schemas, specials, first=number == 1))
        except ValueError as error:
            raise ValueError(f"message {number} of {len(messages)} {error}") from None
    read = _in_order(read)
    segments: Segments = []
    untrained = ""
    system = read[0].content if read and read[0].role == "system" else ""
    if schemas:
        described = TOOLS_PROMPT.replace("{tools}", rendered_tools(schemas))
        system = f"{system}\n\n{described}" if system else described
    if system:
        untrained += f"{TURN_START}system\n{defuse(system, specials)}{TURN_END}\n"
    for number, message in enumerate(read):
        if message.role == "assistant":
            opening = GENERATION_PREFIX if message.reasoning else f"{TURN_START}assistant\n"
            segments += [(untrained + opening, 0), (_assistant_text(message) + TURN_END, 1)]
            untrained = "\n"
        elif message.role == "tool":
            response = f"<tool_response>\n{defuse(message.content, specials)}\n</tool_response>"
            first = number == 0 or read[number - 1].role != "tool"
            last = number + 1 == len(read) or read[number + 1].role != "tool"
            untrained += (f"{TURN_START}user\n" if first else "\n") + response + (f"{TURN_END}\n" if last else "")
        elif message.role == "user":
            untrained += f"{TURN_START}user\n{defuse(message.content, specials)}{TURN_END}\n"
    return segments


def _in_order(messages: list[Message]) -> list[Message]:
    """The results of each turn's calls in the order of the calls, where both have ids. Raises ValueError."""
    ordered: list[Message] = []
    for is_tool, run in itertools.groupby(messages, lambda message: message.role == "tool"):
        members = list(run)
        if is_tool:
            number = len(ordered) + 1
            if not any(message.role == "assistant" for message in ordered):
                raise ValueError(f"message {number} of {len(messages)} is a tool's result, and no call stands before it")
            calls, results = [call.call_id for call in ordered[-1].calls], [one.call_id for one in members]
            if len(calls) > 1 and all(calls) and all(results):
                if lost := next((one for one in results if one not in calls), ""):
                    raise ValueError(f"message {number} of {len(messages)}: no call before it has the tool_call_id {lost!r}")
                if sorted(results) != sorted(calls):
                    raise ValueError(
                        f"message {number} of {len(messages)}: the calls before it have the ids {', '.join(calls)}, "
                        f"the results {', '.join(results)}; each call has one result"
                    )
                members.sort(key=lambda one: calls.index(one.call_id))
        ordered += members
    return ordered


def _checked(message: Message, tools: list[dict[str, Any]], specials: re.Pattern[str] | None, *, first: bool) -> Message:
    """The message. A call that a rollout refuses is refused, in tool_calls and in the text: the model would learn an error."""
    if message.role == "system" and not first:
        raise ValueError("is a system message; it must be the first")
    if specials and message.role == "assistant" and (found := specials.search(_assistant_text(message))):
        raise ValueError(f"holds {found[0]}, which would be trained as a control token; remove it, or spell it otherwise")
    for call in message.calls if tools else ():
        fault, which = call_fault(call.name, call.arguments, tools)
        if fault:
            raise ValueError(f"{fault}: {which}")
    if OPEN in (said := f"{message.reasoning}\n{message.content}") and message.role == "assistant":
        calls = parse_tool_calls(said, [schema_of(tool) for tool in tools])
        if calls and message.calls:
            raise ValueError("writes a call in its text beside tool_calls, which a rollout would run too; write each call once")
        for written in calls:
            named = written.status is CallStatus.UNKNOWN_TOOL and written.name
            if not written.valid and not (named and not tools):  # without tools every name is unknown
                raise ValueError(f"writes a call that a rollout refuses: {written.message}")
    elif message.role == "assistant" and (
        _FOREIGN_CALL.search(said) or is_call_as_text(message.content, map(tool_name, map(schema_of, tools)))
    ):
        raise ValueError(f"writes a call in its text that is not between {OPEN} and {CLOSE}, which a rollout would not run")
    return message


def _assistant_text(message: Message) -> str:
    parts = [f"{message.reasoning}</reason>"] if message.reasoning else []
    parts += [message.content] if message.content else []
    return "\n".join([*parts, *(f"{OPEN}\n{call.body}\n{CLOSE}" for call in message.calls)])


def row_segments(row: Mapping[str, Any], specials: re.Pattern[str] | None = None) -> Segments:
    """Segments of a data row, {"segments": [[text, trained], ...]} or {"messages": [...], "tools": [...]}.

    Raises ValueError for a row of another shape, or of which nothing is trained.
    """
    kwargs = row.get("chat_template_kwargs")  # a turn's own reasoning tells whether it thinks
    asked = any(value for key, value in kwargs.items() if key != "enable_thinking") if isinstance(kwargs, dict) else kwargs
    given = [key for key in _KEYS if row.get(key) not in (None, "") and (asked or key != "chat_template_kwargs")]
    if given not in (["segments"], ["messages"]) or not isinstance(row[given[0]], list):
        raise ValueError(
            'expected {"messages": [...], "tools": [...]} or {"segments": [[text, 0 or 1], ...]}, got '
            + (" and ".join(f"{key!r} of type {json_type(row[key])}" for key in given) or "neither 'segments' nor 'messages'")
            + "; a system text is the first message, and functions are tools"
            + "".join(f"; {remedy}" for key, remedy in _OTHER_FORMS.items() if key in row)
        )
    if given == ["messages"]:
        segments = render_conversation(row["messages"], row.get("tools"), specials)
    else:
        segments = [_segment(segment, number) for number, segment in enumerate(row["segments"], 1)]
    if not any(text and trained for text, trained in segments):
        raise ValueError("no token of this row is trained; give it an assistant's turn or a segment marked 1, or remove it")
    return segments


def _segment(segment: Any, number: int) -> tuple[str, int]:
    match segment:
        case [str(text), (0 | 1) as trained]:
            if fault := half_character(text):  # U+0000 may stand in a rollout's own text
                raise ValueError(f"segment {number} has {fault}")
            return text, int(trained)
    raise ValueError(f"segment {number} must be [text, 0 or 1], got {segment!r:.80}")
