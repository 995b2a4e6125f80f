"""Each tool-call format: what a model may write, and the typed calls that come of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.rollout.call_format import PARSERS
from rstar2_megatron.rollout.tool_call import CallStatus

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "x"},
                    "n": {"type": "integer", "description": "x"},
                    "tags": {"type": "array", "description": "x"},
                    "exact": {"type": "boolean", "nullable": True, "description": "x"},
                },
                "required": ["query"],
            },
        },
    }
    for name in ("search", "look")
]
V, JSON, SYNTAX = CallStatus.VALID, CallStatus.BAD_JSON, CallStatus.BAD_SYNTAX
UNKNOWN, ARGUMENTS, UNCLOSED = CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS, CallStatus.UNCLOSED


def xml(name: str = "search", **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


# Well-formed texts of which the engine's detectors make nothing, or something else.
OURS_ALONE = {
    '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a"}}, {"name": "look", "arguments": {"query": "b"}}]',  # no blank
    '[TOOL_CALLS]search[CALL_ID]aB3456789[ARGS]{"query": "a"}',
    'I use [TOOL_CALLS] here.[TOOL_CALLS]search[ARGS]{"query": "a"}',
    "[search(query='a, [b]', n=3, tags=('x',), exact=None)]",  # a tuple
    xml(query="s = '</parameter>'\n<tool_call>"),
}

# format, text, the calls: (status, arguments, or words of the message)
TABLE = [
    # ---------------------------------------------------------------- well-formed
    ("qwen3_coder", "I look.\n" + xml(query="a b", n="3"), [(V, {"query": "a b", "n": 3})]),
    ("qwen3_coder", xml(query="3"), [(V, {"query": "3"})]),
    (
        "qwen3_coder",
        xml(query="a\n\nb\n", tags='["x", 1]', exact="True"),
        [(V, {"query": "a\n\nb\n", "tags": ["x", 1], "exact": True})],
    ),
    ("qwen3_coder", xml(query="x", exact="null"), [(V, {"query": "x", "exact": None})]),
    ("qwen3_coder", xml(query="s = '</parameter>'\n<tool_call>"), [(V, {"query": "s = '</parameter>'\n<tool_call>"})]),
    ("qwen3_coder", "<tool_call><function=search><parameter=query>a</parameter></function></tool_call>", [(V, {"query": "a"})]),
    ("llama3", '{"name": "search", "parameters": {"query": "a", "n": 3}}', [(V, {"query": "a", "n": 3})]),
    (
        "llama3",
        'So:\n<|python_tag|>{"name": "search", "parameters": {"query": "{\\"name\\": 1}"}}',
        [(V, {"query": '{"name": 1}'})],
    ),
    ("llama3", '{"name": "search", "arguments": {"query": "a"}}', [(V, {"query": "a"})]),
    ("llama3", '{"type": "function", "name": "search", "parameters": {"query": "a"}}', [(V, {"query": "a"})]),
    (
        "pythonic",
        "[search(query='a, [b]', n=3, tags=('x',), exact=None)]",
        [(V, {"query": "a, [b]", "n": 3, "tags": ["x"], "exact": None})],
    ),
    ("pythonic", 'I look.\n<|python_start|>[search(query="\\d")]<|python_end|>\n', [(V, {"query": "\\d"})]),
    ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a"}, "id": "123456789"}]', [(V, {"query": "a"})]),
    ("mistral", 'So.[TOOL_CALLS]search[ARGS]{"query": "[TOOL_CALLS]"}', [(V, {"query": "[TOOL_CALLS]"})]),
    ("mistral", '[TOOL_CALLS]search[CALL_ID]aB3456789[ARGS]{"query": "a"}', [(V, {"query": "a"})]),
    # ---------------------------------------------------------------- several
    ("qwen3_coder", xml(query="a") + "\n" + xml("look", query="b"), [(V, {"query": "a"}), (V, {"query": "b"})]),
    (
        "llama3",
        '<|python_tag|>{"name": "search", "parameters": {"query": "a"}}; {"name": "look", "parameters": {"query": "b"}}',
        [(V, {"query": "a"}), (V, {"query": "b"})],
    ),
    ("pythonic", "[search(query='a'), look(query='b')]", [(V, {"query": "a"}), (V, {"query": "b"})]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a"}}, {"name": "look", "arguments": {"query": "b"}}]',
        [(V, {"query": "a"}), (V, {"query": "b"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]search[ARGS]{"query": "a"}[TOOL_CALLS]look[ARGS]{"query": "b"}',
        [(V, {"query": "a"}), (V, {"query": "b"})],
    ),
    # ---------------------------------------------------------------- a call beside prose about calls
    ("qwen3_coder", f"I use the <tool_call> format. {xml(query='a')}", [(V, {"query": "a"})]),
    ("qwen3_coder", f"Between <tool_call> and </tool_call>: {xml(query='a')}", [(V, {"query": "a"})]),
    ("qwen3_coder", f"<tool_call>\n{xml(query='a')}", [(V, {"query": "a"})]),
    ("qwen3_coder", xml(query="<tool_call>") + " Between <tool_call> tags.", [(V, {"query": "<tool_call>"})]),
    ("mistral", 'I use [TOOL_CALLS] here.[TOOL_CALLS]search[ARGS]{"query": "a"}', [(V, {"query": "a"})]),
    (
        "llama3",
        'The tag <|python_tag|> begins it.<|python_tag|>{"name": "search", "parameters": {"query": "a"}}',
        [(V, {"query": "a"})],
    ),
    # ---------------------------------------------------------------- cut by the end of the turn
    ("qwen3_coder", "<tool_call>", [(UNCLOSED, "not closed with </tool_call>")]),
    ("qwen3_coder", "<tool_call>\n<func", [(UNCLOSED, "not closed with </tool_call>")]),
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=query>\na", [(UNCLOSED, "not closed with </function>")]),
    ("qwen3_coder", xml(query="a").removesuffix("\n</tool_call>"), [(UNCLOSED, "not closed with </tool_call>")]),
    ("llama3", '{"name": "search", "par', [(UNCLOSED, "the turn ended inside its JSON")]),
    ("llama3", "<|python_tag|>", [(UNCLOSED, "the turn ended inside its JSON")]),
    ("llama3", '{"name": "search", "parameters": {"query": "a"}', [(UNCLOSED, "the turn ended inside its JSON")]),
    ("pythonic", "[search(query='a'", [(UNCLOSED, "not closed with ]")]),
    ("pythonic", "[search(query='a", [(UNCLOSED, "not closed with ]")]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a"}}',
        [(UNCLOSED, "the turn ended inside its JSON")],
    ),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a', [(UNCLOSED, "the turn ended inside its JSON")]),
    ("mistral", "[TOOL_CALLS]", [(UNCLOSED, "the turn ended inside its JSON")]),
    # ---------------------------------------------------------------- broken
    (
        "qwen3_coder",
        '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>',
        [(SYNTAX, "is not of the form <tool_call>")],
    ),
    (
        "qwen3_coder",
        "<function=search>\n<parameter=query>\na\n</parameter>\n</function>",
        [(SYNTAX, "lacks <tool_call> before")],
    ),
    ("qwen3_coder", xml(query="a").replace("</function>", "more </function>"), [(SYNTAX, "'<parameter=query>")]),
    (
        "qwen3_coder",
        xml(query="a").replace("</tool_call>", "and <b></tool_call>"),
        [(SYNTAX, "where a parameter or </tool_call> is due")],
    ),
    ("llama3", '[{"name": "search", "parameters": {"query": "a"}}]', [(JSON, 'must be a JSON object with "name"')]),
    (
        "llama3",
        '{"type": "function", "function": {"name": "search", "parameters": {}}}',
        [(JSON, 'lacks "name", "parameters"')],
    ),
    ("llama3", '{"name": "search", "parameters": {"query": "a\nb"}}', [(JSON, "a raw line end inside a string")]),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a\nb"}', [(JSON, "a raw line end inside a string")]),
    ("pythonic", "[search(query='a\nb')]", [(SYNTAX, "in line 1 that does not end; inside it write \\n for a line end")]),
    ("pythonic", "[search(query='a',\n n='b", [(UNCLOSED, "not closed with ]")]),
    ("pythonic", "[search(query='it's')]", [(SYNTAX, "a string in line 1 that does not end; inside it write")]),
    ("qwen3_coder", xml(query="a", n="three"), [(ARGUMENTS, '"n" must be of type integer, got string')]),
    (
        "qwen3_coder",
        xml(query="s = '</parameter>\n<parameter=n>'", n="3") + xml(query="a"),
        [(SYNTAX, "gives the parameter 'n' twice; write each once, and no </parameter> in a value"), (V, {"query": "a"})],
    ),
    ("qwen3_coder", xml(n="3") + xml(query="a"), [(ARGUMENTS, 'needs the argument "query"'), (V, {"query": "a"})]),
    ("llama3", "{'name': 'search', 'parameters': {}}", [(JSON, "write names in double quotes")]),
    ("llama3", '<|python_tag|>search.call(query="a")', [(JSON, "write one JSON object")]),
    ("llama3", '{"name": "search", "parameters": {"query": "a"}} I wait.', [(JSON, "text after its JSON: 'I wait.'")]),
    (
        "llama3",
        '{"name": "search", "parameters": "{\\"query\\": 1}"}',
        [(ARGUMENTS, '"parameters" must be a JSON object, got string')],
    ),
    ("llama3", '{"name": "search"}', [(JSON, 'lacks "parameters"')]),
    ("llama3", '{"name": "search", "parameters": {"query": "a", "query": "b"}}', [(JSON, "the key 'query' stands twice")]),
    ("pythonic", "[search(query='a', query='b')]", [(ARGUMENTS, 'gives the argument "query" twice; write each once')]),
    ("pythonic", "[search('a')]", [(ARGUMENTS, "Write every argument of 'search' as key=value")]),
    *(
        ("pythonic", f"[search(query='a', tags=[{value}])]", [(ARGUMENTS, 'Argument "tags" holds a value that is no JSON')])
        for value in ("{1, 2}", "b'x'", "1j", "...", "{1: 'a', 'b': 2}", "0x" + "F" * 5000, "1e999")
    ),
    (
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"query": "a", "tags": ["\\ud83d"]}}</tool_call>',
        [(ARGUMENTS, "half of a surrogate")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "search", "arguments": {"query": "a", "tags": [NaN]}}</tool_call>',
        [(ARGUMENTS, "no JSON")],
    ),
    ("pythonic", "[search(query=a + b)]", [(ARGUMENTS, "must be written out as a value, got 'a + b'")]),
    ("pythonic", "[search(query='a'), 3]", [(V, {"query": "a"}), (SYNTAX, "'3' is no call")]),
    ("pythonic", "[search(query='a')] I wait.", [(SYNTAX, "end the turn with the list")]),
    ("pythonic", "[search(query='a')] and 3", [(SYNTAX, "text after its list")]),
    ("pythonic", "[search(query={1})]", [(ARGUMENTS, '"query" must be of type string')]),
    ("mistral", "[TOOL_CALLS] [{'name': 'search'}]", [(JSON, "write names in double quotes")]),
    ("mistral", "[TOOL_CALLS] []", [(JSON, "a list of calls is due")]),
    ("mistral", '[TOOL_CALLS] [{"name": "search"}]', [(JSON, 'lacks "arguments"')]),
    ("mistral", "[TOOL_CALLS] search", [(JSON, "not valid JSON")]),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a"} I wait.', [(JSON, "text after its JSON: 'I wait.'")]),
    # ---------------------------------------------------------------- unknown
    ("qwen3_coder", xml("Wolfram", query="a"), [(UNKNOWN, 'There is no tool \'Wolfram\'. Known tools: "search", "look".')]),
    ("llama3", '{"name": "Wolfram", "parameters": {}}', [(UNKNOWN, "There is no tool 'Wolfram'")]),
    ("pythonic", "[Wolfram(query='a')]", [(UNKNOWN, "There is no tool 'Wolfram'")]),
    ("pythonic", "[web.search(query='a')]", [(UNKNOWN, "There is no tool 'web.search'")]),
    ("mistral", "[TOOL_CALLS]Wolfram[ARGS]{}", [(UNKNOWN, "There is no tool 'Wolfram'")]),
    # ---------------------------------------------------------------- prose
    ("qwen3_coder", "I would use the <tool_call> tag, but 4 < 5.", []),
    ("qwen3_coder", "The answer is \\boxed{4}.", []),
    ("llama3", 'The pair {"name": "search", "parameters": {}} is a call.', []),
    ("llama3", '{"answer": 4}', []),
    ("pythonic", "Then [f(x), g(x)] is a basis.", []),
    ("pythonic", "So:\n[f(x), g(x)]", []),
    ("pythonic", "[4, 5]", []),
    ("mistral", "The answer is [4].", []),
]


@pytest.mark.parametrize(("form", "text", "expected"), TABLE)
def test_table(form: str, text: str, expected: list[tuple[CallStatus, object]]) -> None:
    calls = PARSERS[form](text, SCHEMAS)
    assert [call.status for call in calls] == [status for status, _ in expected], calls
    for call, (status, what) in zip(calls, expected):
        if status is V:
            assert call.arguments == what and call.name in ("search", "look") and not call.message
        else:
            assert isinstance(what, str) and what in call.message


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024", "2024"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"$defs": {"C": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]}, "1", "1"),
        ({"type": ["string", "array"]}, "12", "12"),
        ({"type": ["string", "array"]}, '["a"]', ["a"]),
        ({"type": ["integer", "string"]}, "12", 12),
        ({"type": ["integer", "string"]}, "1.5", "1.5"),
        ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "12", 12),
        ({"$defs": {"C": {"$ref": "#/$defs/C"}}, "$ref": "#/$defs/C"}, "12", 12),
        ({}, "12", 12),
    ],
)
def test_a_text_that_looks_like_json_stays_a_text(spec: dict[str, object], text: str, expected: object) -> None:
    form = {"type": "object", "properties": {"x": spec}}
    schema = {"type": "function", "function": {"name": "search", "description": "x", "parameters": form}}
    (call,) = PARSERS["qwen3_coder"](xml(x=text), [schema])
    assert call.status is V and call.arguments == {"x": expected}, call


def test_every_format_has_every_kind() -> None:
    for form in PARSERS.keys() - {"hermes"}:
        kinds = {status for named, _, expected in TABLE if named == form for status, _ in expected}
        assert kinds >= {V, UNCLOSED, UNKNOWN} and kinds & {JSON, SYNTAX} and (form, []) in [(f, e) for f, _, e in TABLE]


PIECES = [
    "<tool_call>", "</tool_call>", "<function=search>", "</function>", "<parameter=query>", "</parameter>", "<|python_tag|>",
    '{"name": "search", "parameters": {"query": "a"}}', "[TOOL_CALLS]", "[ARGS]", "search", "(query=", "[", "]", ")", "{", "}",
    '"', "'", ";", "\n", " ", "\ud800", "\0", "\\",
]  # fmt: skip


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14).map("".join))
def test_nothing_raises(form: str, text: str) -> None:
    for call in PARSERS[form](text, SCHEMAS):
        assert call.valid != bool(call.message)


@pytest.mark.parametrize("form", sorted(PARSERS))
@pytest.mark.parametrize(
    "text",
    [
        "[search(query=" + "[" * 9000,
        "[search(n=" + "-" * 90_000 + "1)]",
        "[search(n=" + "9" * 9000 + ")]",
        "search[CALL_ID]" + " " * 200_000,
    ],
)
def test_deep_and_long_texts_are_broken_calls(form: str, text: str) -> None:
    behind = {"llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}.get(form, "")
    assert not any(call.valid for call in PARSERS[form](behind + text, SCHEMAS))


@pytest.mark.ci
@pytest.mark.parametrize("form", sorted(PARSERS.keys() - {"hermes"}))
def test_well_formed_calls_are_those_of_the_engines_detectors(form: str) -> None:
    """The engine's own server reads the same calls out of them; what it does with others is not told to a model."""
    from rstar2_megatron.cpu import sglang

    sglang.install()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Tool.model_validate(schema) for schema in SCHEMAS], form)
    for named, text, expected in TABLE:
        if named == form and expected and all(status is V for status, _ in expected) and text not in OURS_ALONE:
            _, theirs = parser.parse_non_stream(text)
            ours = [(call.name, call.arguments) for call in PARSERS[form](text, SCHEMAS)]
            assert [(call.name, json.loads(call.parameters)) for call in theirs] == ours, text
