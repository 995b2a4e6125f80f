"""Conversations of every public shape, the mixture, and what of them is trained."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.data import resumable
from rstar2_megatron.data.cleaning import words
from rstar2_megatron.data.conversation import read_message
from rstar2_megatron.data.rows import DataError, Row, Unusable, inputs_of
from rstar2_megatron.data.sft_set import Options, main, process
from rstar2_megatron.data.sft_sources import SFT_SOURCES
from rstar2_megatron.data.tool_text import json_call, python_calls, tool_schema
from rstar2_megatron.rollout.tool_call import parse_tool_calls
from rstar2_megatron.sft.format import render_conversation
from rstar2_megatron.sft.rows import load_sft_rows
from rstar2_megatron.tools import TOOL_SCHEMAS
from tests.data.test_inputs_page import Letters
from tests.data.watched import watched

WEATHER = {
    "name": "Get Weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "dict",
        "properties": {"city": {"type": "string"}, "days": {"type": "list", "items": {"type": "int"}}},
        "required": ["city"],
    },
    "required": None,
}


def toolace(i: int = 0, call: str = '[Get Weather(city="Oslo, \\"N\\"", days=[1, 2])]') -> dict[str, Any]:
    return {
        "system": "You are an expert in composing functions. Here is a list of functions in JSON format that you "
        f"can invoke:\n{json.dumps([WEATHER])}. \nShould you decide to return the function call(s). Put it in the "
        "format of [func1(params_name=params_value), func2(params)]\n",
        "conversations": [
            {"from": "user", "value": f"Weather of Oslo, {i}?"},
            {"from": "assistant", "value": call},
            {"from": "tool", "value": '[{"name": "Get Weather", "results": {"t": 3}}]'},
            {"from": "assistant", "value": "Three degrees."},
        ],
    }


def apigen(i: int = 0) -> dict[str, Any]:
    tool = {"name": "refund", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}
    return {
        "conversations": [
            {"from": "human", "value": f"Refund order {i}."},
            {"from": "gpt", "value": "Sure?"},
            {"from": "human", "value": "Yes."},
            {"from": "function_call", "value": '{"name": "refund", "arguments": {"order": "#W1"}}'},
            {"from": "observation", "value": '{"status": "done"}'},
            {"from": "gpt", "value": "Done."},
        ],
        "tools": json.dumps([tool]),
        "system": "# Retail agent policy",
    }


def glaive(i: int = 0) -> dict[str, Any]:
    tool = {"name": "rate", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    return {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
        + json.dumps(tool, indent=4),
        "chat": f"USER: Rate {i}?\n\n\nASSISTANT: <functioncall> "
        '{"name": "rate", "arguments": \'{"a": "it\\\'s USD"}\'} <|endoftext|>\n\n\n'
        'FUNCTION RESPONSE: {"rate": 0.85}\n\n\nASSISTANT: It is 0.85. <|endoftext|>\n\n\n'
        "USER: Thanks\n\n\nASSISTANT: Welcome! <|endoftext|>",
    }


def magicoder(i: int = 0, lang: str = "python", code: str = 'print("a\\n")') -> dict[str, Any]:
    return {
        "lang": lang,
        "raw_index": i,
        "problem": f"Print a, {i}.",
        "solution": f"Here it is:\n```{lang}\n{code}\n```\nIt prints.",
    }


def tulu(i: int = 0) -> dict[str, Any]:
    return {
        "id": str(i),
        "messages": [{"role": "user", "content": f"Write {i} words."}, {"role": "assistant", "content": "word"}],
        "source": "ai2-adapt-dev/x",
    }


def nemotron(i: int = 0, reasoning: str = "off") -> dict[str, Any]:
    return {
        "input": [{"role": "user", "content": f"Hello {i}"}],
        "output": "Hi." if reasoning == "off" else "<think>\nhm\n</think>\nHi.",
        "category": "chat",
        "reasoning": reasoning,
        "system_prompt": f"detailed thinking {reasoning}",
        "used_in_training": "yes",
    }


ROWS = {"toolace": toolace, "apigen-mt": apigen, "glaive": glaive, "magicoder": magicoder, "tulu3": tulu, "nemotron": nemotron}


def with_system(in_input: str, beside: str) -> dict[str, Any]:
    return {**nemotron(), "system_prompt": beside, "input": [{"role": "system", "content": in_input}, *nemotron()["input"]]}


def parse(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return SFT_SOURCES[name].parse(Row("here:1", values))


def roles(conversation: dict[str, Any]) -> str:
    return " ".join(m["role"] + "!" * len(m.get("tool_calls", [])) for m in conversation["messages"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("toolace", "user assistant! tool assistant"),
        ("apigen-mt", "system user assistant user assistant! tool assistant"),
        ("glaive", "user assistant! tool assistant user assistant"),
        ("magicoder", "user assistant!"),
        ("tulu3", "user assistant"),
        ("nemotron", "user assistant"),
    ],
)
def test_every_shape_becomes_one_conversation(name: str, expected: str) -> None:
    conversation = parse(name, ROWS[name]())
    assert roles(conversation) == expected and conversation["source"] == name


@pytest.mark.parametrize(
    ("name", "values", "system"),
    [
        ("nemotron", {**nemotron(), "system_prompt": "Be a pirate.\ndetailed thinking off"}, "Be a pirate."),
        ("nemotron", {**nemotron(), "system_prompt": "detailed thinking off\n\nBe a pirate."}, "Be a pirate."),
        ("toolace", {**toolace(), "system": f"The current time is 2025-01-31 09:00.{toolace()['system']}"}, "2025-01-31 09:00"),
        (
            "toolace",
            {
                **toolace(),
                "system": f"Today is 2024-03-05, Tuesday.\nThe current time is 10:00 a.m. in Oslo. {toolace()['system']}",
            },
            "Today is 2024-03-05, Tuesday\nThe current time is 10:00 a.m. in Oslo",
        ),
        (
            "toolace",
            {
                **toolace(),
                "system": toolace()["system"]
                .replace("[{", "[\n {")
                .replace("Weather of", "The current time is UTC. Weather of"),
            },
            None,
        ),
        ("nemotron", with_system("", "Be a pirate."), "Be a pirate."),
        ("nemotron", with_system("Be a pirate.", "Be a pirate.\ndetailed thinking off"), "Be a pirate."),
        ("nemotron", with_system("Be a pirate.", "detailed thinking off"), "Be a pirate."),
        ("glaive", {**glaive(), "system": f"Use {{name}}. {glaive()['system']}"}, "Use {name}."),
        ("glaive", {**glaive(), "system": f"{glaive()['system'].partition('{')[0]}Be a pirate.\n"}, "Be a pirate."),
        ("glaive", {**glaive(), "system": "SYSTEM: You are a helpful assistant, with no access to external functions."}, None),
    ],
)
def test_system_texts_stay_but_for_instructions_of_the_set(name: str, values: dict[str, Any], system: str | None) -> None:
    if name == "glaive":
        values["chat"] = "USER: Hello\n\n\nASSISTANT: Hi. <|endoftext|>"
    first = parse(name, values)["messages"][0]
    assert (first["role"] == "system" and first["content"].endswith(system)) if system else first["role"] == "user"


@pytest.mark.parametrize("name", ["toolace", "glaive"])
def test_prose_costs_no_conversation(name: str) -> None:
    values = {**ROWS[name](), "system": f"{ROWS[name]()['system']}\nUse {{name}} of the user."}
    said = "Get Weather(city) needs the city. Please give it."
    if name == "toolace":
        values["conversations"] = [values["conversations"][0], {"from": "assistant", "value": said}]
    else:
        values["chat"] = values["chat"].replace("It is 0.85.", "rate(a) was called. It is 0.85.")
    assert len(parse(name, values)["tools"]) == 1


def test_long_runs_of_blanks_cost_no_time() -> None:
    """A pattern that begins anew at each of them takes minutes."""
    blanks, started = "\n " * 200_000, time.monotonic()
    with pytest.raises(Unusable):
        parse("glaive", {**glaive(), "chat": blanks})
    with pytest.raises(Unusable):
        parse("glaive", {"system": "You are a helpful assistant with access to " * 23_000, "chat": ""})
    read = read_message({"role": "assistant", "content": f"<think>a{blanks}b</think>c"})
    assert read.reasoning == f"a{blanks}b" and words("{" + blanks, operators=True) == ["{"]
    assert time.monotonic() - started < 60


def test_words_before_a_call_stay() -> None:
    chat = glaive()["chat"].replace("ASSISTANT: <functioncall>", "ASSISTANT: I look.\n<functioncall>")
    assert parse("glaive", {**glaive(), "chat": chat})["messages"][1]["content"] == "I look."


def test_calls_keep_their_arguments_exactly() -> None:
    (call,) = parse("toolace", toolace())["messages"][1]["tool_calls"]
    assert call == {"name": "Get Weather", "arguments": {"city": 'Oslo, "N"', "days": [1, 2]}}
    (call,) = parse("glaive", glaive())["messages"][1]["tool_calls"]
    assert call == {"name": "rate", "arguments": {"a": "it's USD"}}
    (call,) = parse("magicoder", magicoder())["messages"][1]["tool_calls"]
    assert call["arguments"] == {"code": 'print("a\\n")', "input": ""}
    schema = parse("toolace", toolace())["tools"][0]["function"]["parameters"]
    assert schema["type"] == "object" and schema["properties"]["days"] == {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            "[f(a=1, b='x, y', c={\"k\": [1, (2)]}, d=True, e=null)]",
            [("f", {"a": 1, "b": "x, y", "c": {"k": [1, 2]}, "d": True, "e": None})],
        ),
        ('[A b-c(x-y="1"), g()]', [("A b-c", {"x-y": "1"}), ("g", {})]),
        ('[f(text="it\'s (so) [far]")]', [("f", {"text": "it's (so) [far]"})]),
        ("[f(x=-1.5e3)]", [("f", {"x": -1500.0})]),
    ],
)
def test_python_calls(text: str, calls: list[Any]) -> None:
    assert [(c["name"], c["arguments"]) for c in python_calls(text)] == calls


@pytest.mark.parametrize(
    "text", ["[]", "f(a=1)", "[f(a=1]", "[f(1)]", "[f(a=os.system)]", '[f(a="x)]', "[f(a=1)) ]", "[f(a=1, a=2)]"]
)
def test_what_is_no_call_is_not_guessed(text: str) -> None:
    with pytest.raises(ValueError):
        python_calls(text)


def test_a_call_of_the_name_alone_has_no_arguments() -> None:
    assert json_call('{"name": "f"}') == {"name": "f", "arguments": {}}
    assert json_call('{"name": "f", "parameters": {"a": 1}}') == {"name": "f", "arguments": {"a": 1}}
    with pytest.raises(ValueError, match="arguments are of type null"):
        json_call('{"name": "f", "args": {"a": 1}}')


def test_content_in_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "Write "}, {"type": "text", "text": "2."}]
    conversation = parse("tulu3", {"messages": [{"role": "user", "content": parts}, tulu()["messages"][1]]})
    assert conversation["messages"][0]["content"] == "Write 2."
    conversation = parse("nemotron", {**nemotron(), "input": [{"role": "user", "content": parts}]})
    assert conversation["messages"][0]["content"] == "Write 2."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"name": "f", "name": "g"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": \'{x}\'}',
    ],
)
def test_json_that_is_no_call(text: str) -> None:
    with pytest.raises(ValueError):
        json_call(text)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("toolace", toolace(call="[Get Weather(city=Oslo)]"), "cannot be read"),
        ("toolace", toolace(call="[Get Weather(days=[1])]"), "a call that a rollout refuses"),
        ("toolace", toolace(call="[Get Weather(city=[1])]"), "a call that a rollout refuses"),
        ("toolace", toolace(call="[Get Wind(city='Oslo')]"), "not described"),
        ("toolace", toolace(call="Get Weather(city='Oslo')"), "a call in the text"),
        ("toolace", toolace(call="['Get Weather'(city='Oslo')]"), "a call in the text"),
        ("toolace", toolace(call='[{"name": "Get Weather", "arguments": {"city": "Oslo"}}]'), "a call in the text"),
        ("toolace", toolace(call="[Get Weather]"), "tool response without a call"),
        (
            "toolace",
            {**toolace(), "system": toolace()["system"].replace('"required": ["city"]', '"required": [city]')},
            "cannot",
        ),
        ("toolace", {**toolace(), "system": "No functions."}, "not described"),
        ("glaive", {**glaive(), "system": glaive()["system"].replace('"d"', "d")}, "cannot be read"),
        (
            "nemotron",
            {**nemotron(), "system_prompt": "a", "input": [{"role": "system", "content": "b"}, *nemotron()["input"]]},
            "system message in the middle",
        ),
        (
            "nemotron",
            {**nemotron(), "input": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>Hi"},
            "a chat template has",
        ),
        ("tulu3", {**tulu(), "images": ["a.png"]}, "the row has images, which no model here reads"),
        ("magicoder", magicoder(lang="rust"), "not Python"),
        ("magicoder", magicoder(code="print("), "not one Python program"),
        ("nemotron", nemotron(reasoning="on"), "reasoning"),
        ("tulu3", {"messages": tulu()["messages"][:1]}, "does not end with the assistant"),
        ("tulu3", {"messages": [*tulu()["messages"], *tulu()["messages"][1:]]}, "two assistant turns"),
        (
            "tulu3",
            {"messages": [tulu()["messages"][0], {"role": "assistant", "content": "a<|im_end|>b"}]},
            "not read in training: holds <.im_end.>",
        ),
        ("toolace", {"system": "x", "conversations": [{"role": "user"}]}, "not as toolace writes its rows"),
        ("tulu3", {"messages": [{"role": "user"}]}, "not read in training: has no content"),
        (
            "tulu3",
            {"messages": [tulu()["messages"][0], {"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}]},
            "not read in training: has the key 'tool_calls'",
        ),
        ("tulu3", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not read in training: has content of"),
        ("apigen-mt", {**apigen(), "tools": '[{"name": "refund", "parameters": "{}"}]'}, "not read in training: has tools"),
        (
            "tulu3",
            {"messages": [{"role": "user", "content": "a\0"}, tulu()["messages"][1]]},
            "in training: has (half of|the control character)",
        ),
        (
            "tulu3",
            {"messages": [{"role": "user", "content": "a\ud800"}, tulu()["messages"][1]]},
            "in training: has (half of|the control character)",
        ),
    ],
)
def test_conversations_that_would_teach_something_wrong_are_left_out(name, values, why) -> None:
    with pytest.raises(Unusable, match=why):
        parse(name, values)


@pytest.mark.parametrize(
    ("name", "values", "message"), [("glaive", {"system": "x"}, "here:1: a row of glaive needs 'chat'; it has system")]
)
def test_rows_of_another_shape_are_errors(name, values, message) -> None:
    with pytest.raises(DataError, match=message):
        parse(name, values)


def test_only_assistant_turns_are_trained_and_calls_parse_as_in_rollouts() -> None:
    conversation = parse("glaive", glaive())
    segments = render_conversation(conversation["messages"], conversation["tools"])
    assert [trained for _, trained in segments] == [0, 1, 0, 1, 0, 1]
    trained = [text for text, t in segments if t]
    assert all(text.endswith("<|im_end|>") for text in trained)
    (call,) = parse_tool_calls(trained[0], conversation["tools"])
    assert call.valid and call.arguments == {"a": "it's USD"}
    assert trained[1:] == ["It is 0.85.<|im_end|>", "Welcome!<|im_end|>"]
    untrained = "".join(text for text, t in segments if not t)
    assert "<tools>" in untrained and '"name": "rate"' in untrained
    assert '<tool_response>\n{"rate": 0.85}\n</tool_response><|im_end|>' in untrained
    assert "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n" in untrained


def test_several_tool_answers_share_a_turn_and_cannot_close_it() -> None:
    messages = [
        {"role": "user", "content": "both"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}] * 2},
        {"role": "tool", "content": "1<|im_end|>"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "ok"},
    ]
    text = "".join(text for text, _ in render_conversation(messages))
    assert text.count("<|im_start|>") == text.count("<|im_end|>") == 4
    assert "<tool_response>\n1< |im_end|>\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text


def write_sources(directory: Path, count: int) -> list[str]:
    words = []
    for name, make in ROWS.items():
        path = directory / f"{name}.jsonl"
        rows = [make(i) for i in range(count)] + [make(0)]
        if name == "magicoder":
            rows.append(magicoder(99, lang="rust"))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words.append(f"{name}={path}")
    return words


COUNTS = {"toolace": 4, "apigen-mt": 2, "glaive": 12, "magicoder": 6, "tulu3": 5, "nemotron": 50}


def test_mixture_has_the_wanted_numbers_and_is_the_same_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "SAVE_ROWS", 4)
    inputs = [source for word in write_sources(tmp_path, 20) for source in inputs_of(word, SFT_SOURCES)]
    options = Options(COUNTS, validation=6)
    report = process(inputs, tmp_path / "whole", options)
    taken = {name: counts["taken"] for name, counts in report["sources"].items()}
    assert taken == {**COUNTS, "nemotron": 20}  # as many as there are
    assert report["sources"]["magicoder"]["dropped"]["not Python"] == 1
    assert report["written"] == {"train.jsonl": 43, "validation.jsonl": 6}
    lines = (tmp_path / "whole" / "train.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["source"] for line in lines[:22])["nemotron"] > 4  # mixed, not in blocks

    with pytest.raises(KeyboardInterrupt):  # in the third source
        process(watched(inputs, [], kill_at=50), tmp_path / "out", options)
    assert process(inputs, tmp_path / "out", options) == report
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == (tmp_path / "whole" / "train.jsonl").read_bytes()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [part for word in write_sources(tmp_path, 5) for part in ("--source", word)]
    out = tmp_path / "out"
    assert main(["--out", str(out), *words, "--scale", "0.0005", "--count", "tulu3=1", "--limit", "3"]) == 0
    printed = capsys.readouterr().out
    assert "wanted" in printed and "15 rows to" in printed
    assert main(["--out", str(out), "--source", "toolbench"]) == 2
    assert "already holds" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "b"), "--scale", "inf"]) == 2
    assert main(["--out", str(tmp_path / "b"), "--source", "toolbench"]) == 2
    assert "unknown source 'toolbench'" in capsys.readouterr().err


def test_paper_mixture_by_default() -> None:
    """165 K function calling and code, 30 K instructions, 27 K chat (arXiv 2508.20722, section 3.1)."""
    counts = {name: source.count for name, source in SFT_SOURCES.items()}
    assert sum(counts[n] for n in ("toolace", "apigen-mt", "glaive", "magicoder")) == 165_000
    assert (counts["magicoder"], counts["tulu3"], counts["nemotron"]) == (48_000, 30_000, 27_000)


def test_tool_schemas_of_ours_pass_through() -> None:
    for schema in TOOL_SCHEMAS.values():
        assert tool_schema(schema) == schema


def test_what_is_written_is_what_training_reads(tmp_path: Path) -> None:
    """Every source with odd texts in a row among good ones: odd rows are dropped and counted, the others are trained."""
    rows = {name: [make(i) for i in range(3)] for name, make in ROWS.items()}
    odd = ("\0", "\ud800", "<|im_end|>", "<|endoftext|>", "\x1b[31m", "<tool_call>", "</tool_response>", "½²", "\u2028")
    for text in odd:
        rows["tulu3"] += [
            {"messages": [{"role": "user", "content": f"Say {text!r}{text}"}, {"role": "assistant", "content": "a"}]},
            {"messages": [{"role": "user", "content": f"Hear {text!r}"}, {"role": "assistant", "content": f"a{text}"}]},
        ]
        rows["glaive"].append({**glaive(), "chat": glaive()["chat"].replace("0.85", text).replace("Rate 0", f"Rate {text!r}")})
        rows["toolace"].append(toolace(call=f"[Get Weather(city={json.dumps(text)})]"))
    rows["apigen-mt"].append({**apigen(), "tools": apigen()["tools"].replace('"description": ""', '"description": "\\ud800"')})
    rows["apigen-mt"] += [{"conversations": None, "tools": "[]"}, {"tools": "[]"}]
    words = []
    for name, content in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
        words.append(f"{name}={path}")
    inputs = [source for word in words for source in inputs_of(word, SFT_SOURCES)]
    report = process(inputs, tmp_path / "out", Options(dict.fromkeys(ROWS, 100)))
    train = tmp_path / "out" / "train.jsonl"
    assert len(load_sft_rows([train], Letters(), 10_000)) == report["rows_out"] > 3 * len(ROWS) + len(odd)
    dropped = report["sources"]["apigen-mt"]["dropped"]
    assert dropped.pop("without a column that the first row has") == 1 and sum(dropped.values()) == 2
    first = report["sources"]["tulu3"]["first_dropped"]
    assert (
        first["not read in training: has the control character U+0000, which no reader sees; remove it"]
        == f"{tmp_path / 'tulu3.jsonl'}:4"
    )
