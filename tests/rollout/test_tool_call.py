"""Whatever a model writes, parsing gives typed calls and never raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.rollout.tool_call import CallStatus, check_call, parse_tool_calls
from rstar2_megatron.tools import STANDARD_IO, tool_schemas

SCHEMAS = tool_schemas([STANDARD_IO])


def call(name: object = STANDARD_IO, arguments: object = None) -> str:
    arguments = {"code": "print(1)", "input": ""} if arguments is None else arguments
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_valid_call_with_text_around() -> None:
    (parsed,) = parse_tool_calls("think</reason> " + call() + " trailing", SCHEMAS)
    assert parsed.valid
    assert parsed.name == STANDARD_IO
    assert parsed.arguments == {"code": "print(1)", "input": ""}


def test_no_call() -> None:
    assert parse_tool_calls("<answer>\\boxed{3}</answer> </tool_call>", SCHEMAS) == []


def test_code_may_contain_the_closing_tag() -> None:
    code = "print('</tool_call><tool_call>')"
    (parsed,) = parse_tool_calls(call(arguments={"code": code, "input": ""}), SCHEMAS)
    assert parsed.valid and parsed.arguments["code"] == code


def test_several_calls_in_order() -> None:
    text = call() + "<tool_call>{oops</tool_call>" + call(name="other") + call(arguments={"code": "2", "input": "x"})
    statuses = [parsed.status for parsed in parse_tool_calls(text, SCHEMAS)]
    assert statuses == [CallStatus.VALID, CallStatus.BAD_JSON, CallStatus.UNKNOWN_TOOL, CallStatus.VALID]


def test_unknown_arguments_are_left_out() -> None:
    (parsed,) = parse_tool_calls(call(arguments={"code": "1", "input": "", "timeout": 9}), SCHEMAS)
    assert parsed.valid and set(parsed.arguments) == {"code", "input"}


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("<tool_call>{'name': 1}</tool_call>", CallStatus.BAD_JSON, "character 1"),
        ('<tool_call>{"name": "x"', CallStatus.UNCLOSED, "</tool_call>"),
        ('<tool_call>{"name": "x", "arguments": {}} and more</tool_call>', CallStatus.BAD_JSON, "and more"),
        ("<tool_call>[1]</tool_call>", CallStatus.BAD_JSON, "array"),
        ('<tool_call>{"name": "x"}</tool_call>', CallStatus.BAD_JSON, '"arguments"'),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", CallStatus.BAD_JSON, ""),
        ("<tool_call>" + "1" * 5000 + "</tool_call>", CallStatus.BAD_JSON, ""),
        ("<tool_call></tool_call>", CallStatus.BAD_JSON, ""),
        (call(name="WolframAlpha"), CallStatus.UNKNOWN_TOOL, STANDARD_IO),
        (call(name=["a"]), CallStatus.UNKNOWN_TOOL, "array"),
        (call(name=None), CallStatus.UNKNOWN_TOOL, "null"),
        (call(arguments="print(1)"), CallStatus.BAD_ARGUMENTS, "string"),
        (call(arguments={"code": "1"}), CallStatus.BAD_ARGUMENTS, '"input"'),
        (call(arguments={"code": 1, "input": ""}), CallStatus.BAD_ARGUMENTS, "number"),
        (call(arguments={"code": True, "input": ""}), CallStatus.BAD_ARGUMENTS, "boolean"),
        (call(arguments={"code": "\ud800", "input": ""}), CallStatus.BAD_ARGUMENTS, "surrogate"),
    ],
)
def test_bad_calls_carry_a_useful_message(text: str, status: CallStatus, words: str) -> None:
    (parsed,) = parse_tool_calls(text, SCHEMAS)
    assert parsed.status is status
    assert parsed.message and words in parsed.message
    assert len(parsed.message) < 300
    parsed.message.encode()


PROSE = st.sampled_from(["I use the <tool_call> format. ", "`<tool_call>` and `</tool_call>`: ", "<tool_call>: ", "so "])


@given(st.lists(st.one_of(PROSE, st.integers(0, 9)), max_size=8))
def test_calls_are_found_among_any_prose(parts: list[str | int]) -> None:
    """Every real call is run, in order, and no prose is one."""
    text = "".join(part if isinstance(part, str) else call(arguments={"code": str(part), "input": ""}) for part in parts)
    calls = parse_tool_calls(text, SCHEMAS)
    assert [parsed.arguments.get("code") for parsed in calls] == [str(part) for part in parts if isinstance(part, int)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{} " + "some words that go on " * 9 + "</tool_call>",
        "<tool_call>" + "1" * 5000 + "</tool_call>",
        call(name="a tool of a long name " * 9),
        call(arguments={}),
    ],
)
def test_long_messages_are_cut_between_words(text: str) -> None:
    """With tools of so many names that they do not fit."""
    schemas = [{"type": "function", "function": {"name": f"tool_number_{i}", "parameters": {}}} for i in range(99)]
    for known in (SCHEMAS, schemas):
        (parsed,) = parse_tool_calls(text, known)
        assert 20 < len(parsed.message) < 300
        written = {word.strip("\"'.,") for word in f"{text} {' '.join(s['function']['name'] for s in known)}".split()}
        shown = parsed.message.removesuffix("...").removesuffix(".").split()[-1].strip("\"'.,")
        assert shown in written | {"string", "input"}, parsed.message


def test_a_whole_number_with_a_point_is_an_integer() -> None:
    """As in JSON Schema."""
    form = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {"type": "function", "function": {"name": "f", "description": "", "parameters": form}}
    assert [check_call("f", {"n": n}, [schema]).valid for n in (3, 3.0, 3.5, float("inf"), "3", True)] == [
        True,
        True,
        *[False] * 4,
    ]


def test_types_of_json_schema_that_are_no_word() -> None:
    schema = {"type": "object", "properties": {"x": {"type": ["string", "null"]}, "y": {"type": "any"}}}
    (parsed,) = parse_tool_calls(call("f", {"x": None, "y": True}), [{"function": {"name": "f", "parameters": schema}}])
    assert parsed.valid and parsed.arguments == {"x": None, "y": True}


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": ', f'"{STANDARD_IO}"', ', "arguments": ', "{", "}", '"code": "1"', ", ", "\n"]
)


@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=8)), max_size=20).map("".join))
def test_any_text_gives_typed_calls(text: str) -> None:
    calls = parse_tool_calls(text, SCHEMAS)
    # an opening tag inside a JSON string belongs to that string, so there may be fewer calls than tags
    assert len(calls) <= text.count("<tool_call>")
    assert not calls or "<tool_call>" in text
    for parsed in calls:
        assert parsed.valid == (not parsed.message)
