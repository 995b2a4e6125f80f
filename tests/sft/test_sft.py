"""Supervised fine-tuning: rows, steps, and a resumed run against one that was never interrupted."""

from __future__ import annotations

import itertools
import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AddedToken, AutoTokenizer

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.settings.schema import AgentLoopSettings, SFTPhaseSettings, SFTSettings
from rstar2_megatron.sft.rows import load_sft_rows
from rstar2_megatron.sft.training import batches, learning_rate, sft_phase_of
from rstar2_megatron.tiny.build import TinyPaths
from rstar2_megatron.trajectory import Problem


@pytest.fixture(scope="module")
def tokenizer(built: TinyPaths) -> Any:
    return AutoTokenizer.from_pretrained(built.model)


def test_paper_settings_by_default() -> None:
    """3 epochs, 5e-6, 4 % warm-up, cosine, batch 128 (arXiv 2508.20722, section 3.1): 222 K conversations."""
    phase = sft_phase_of(SFTSettings(), 222_000)
    assert (phase.steps, phase.warmup_steps, phase.batch_size, phase.decay) == (5204, 209, 128, "cosine")
    rates = [learning_rate(phase, step) for step in (0, 207, 208, 2602, 5203)]
    assert rates[0] == pytest.approx(5e-6 / 209) and rates[2] == pytest.approx(5e-6, rel=0.01)
    assert rates[3] == pytest.approx(2.5e-6, rel=0.01) and rates[4] < 1e-11
    assert sft_phase_of(SFTSettings(max_steps=7), 222_000).steps == 7


def test_every_epoch_takes_every_row_once() -> None:
    phase = sft_phase_of(SFTSettings(batch_size=4), 10)
    taken = list(itertools.chain(*batches(10, phase, seed=1)))
    assert len(taken) == 32 and [sorted(taken[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert taken[:10] != taken[10:20]
    assert taken == list(itertools.chain(*batches(10, phase, seed=1)))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def called(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_results_come_in_the_order_of_their_calls(tokenizer: Any, tmp_path: Path) -> None:
    calls = [called("w", "c1", city="Rome"), called("w", "c2", city="Oslo")]
    begin = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    end = {"role": "assistant", "content": "done"}
    results = [result("c2", "cold"), result("c1", "hot")]
    path = write(tmp_path / "a.jsonl", [{"messages": [*begin, *order, end]} for order in (results, results[::-1])])
    rows = load_sft_rows([path], tokenizer, 2000)
    text = tokenizer.decode(rows[0].input_ids)
    assert rows[0].input_ids.tolist() == rows[1].input_ids.tolist() and text.index("hot") < text.index("cold")
    numbered = [{**call, "id": number} for number, call in enumerate(calls)]
    begin[1] = {"role": "assistant", "tool_calls": numbered}
    path = write(
        tmp_path / "a.jsonl", [{"messages": [*begin, {**result("", "cold"), "tool_call_id": 1}, result("0", "hot"), end]}]
    )
    text = tokenizer.decode(load_sft_rows([path], tokenizer, 2000)[0].input_ids)
    assert text.index("hot") < text.index("cold")


def test_a_single_result_may_have_any_id_and_stand_behind_code(tokenizer: Any, tmp_path: Path) -> None:
    """As conversations of code interpreters and of tools that are called by their name are written."""
    ask = {"role": "user", "content": "?"}
    code = {"role": "assistant", "content": "```python\nprint(4)\n```"}
    named = {"role": "assistant", "tool_calls": [called("w", "c1")]}
    turns = [[ask, code, result("x", "4")], [ask, named, result("w", "4")], [ask, named, ask, result("c1", "4")]]
    path = write(tmp_path / "a.jsonl", [{"messages": [*one, {"role": "assistant", "content": "4"}]} for one in turns])
    assert len(load_sft_rows([path], tokenizer, 2000)) == 3


def test_a_table_teaches_no_arguments_that_nobody_wrote(tokenizer: Any, tmp_path: Path) -> None:
    """Objects of one column of parquet have all keys of all rows."""
    ask = {"role": "user", "content": "?"}
    first, second = called("g", "c1", city="Rome"), called("h", "c2", day="Monday")
    turns = [{"role": "assistant", "tool_calls": [first]}, result("c1", "1"), {"role": "assistant", "tool_calls": [second]}]
    tools = [
        {"type": "function", "function": {"name": "g", "parameters": {"properties": {"city": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "h", "parameters": {"properties": {"day": {"type": "string"}}}}},
    ]
    row = {"messages": [ask, *turns], "tools": tools}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() != [row]
    written = load_sft_rows([write(tmp_path / "a.jsonl", [row])], tokenizer, 2000)
    table = load_sft_rows([tmp_path / "a.parquet"], tokenizer, 2000)
    assert table[0].input_ids.tolist() == written[0].input_ids.tolist()


@pytest.mark.parametrize(
    ("value", "said"), [(date(2026, 1, 1), "whose arguments hold what JSON cannot"), (b"x", "JSON cannot")]
)
def test_columns_that_json_cannot_hold(tokenizer: Any, tmp_path: Path, value: Any, said: str) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [called("g", "c1", x=value)]}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a.parquet row 1: message 2 of 2 .*{said}"):
        load_sft_rows([tmp_path / "a.parquet"], tokenizer, 2000)


def test_a_key_that_stands_twice_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [], "messages": [{"role": "assistant", "content": "b"}]}\n')
    with pytest.raises(DataError, match="the key 'messages' stands twice in an object"):
        load_sft_rows([path], tokenizer, 2000)
    calls = [{"name": "f", "arguments": '{"x": 1, "x": 2}'}]
    write(path, [{"messages": [{"role": "assistant", "tool_calls": calls}]}])
    with pytest.raises(DataError, match="message 1 of 1 has JSON in a text in which the key 'x' stands twice"):
        load_sft_rows([path], tokenizer, 2000)


def test_rows_that_are_cut_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"segments": [["ab", 0], ["cd" * n, 1]]} for n in (1, 400)])
    rows = load_sft_rows([path], tokenizer, 64)
    assert (len(rows), rows.cut, rows.skipped) == (2, 1, 0)


def test_rows_keep_ids_and_masks(tokenizer: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Add 12 to 5."}, {"role": "assistant", "content": "17"}]
    path = write(tmp_path / "a.jsonl", [{"segments": [["ab", 0], ["cd", 1]]}, {"messages": messages * 2}])
    rows = load_sft_rows([path], tokenizer, 200)
    assert len(rows) == 2 and rows.num_tokens == rows[0].length + rows[1].length
    assert tokenizer.decode(rows[1].input_ids) == (
        "<|im_start|>user\nAdd 12 to 5.<|im_end|>\n<|im_start|>assistant\n17<|im_end|>\n" * 2
    ).rstrip("\n")
    trained = [i for i, m in zip(rows[1].input_ids, rows[1].loss_mask) if m]
    assert tokenizer.decode(trained) == "17<|im_end|>" * 2
    assert rows.num_trained_tokens == sum(rows[0].loss_mask) + sum(rows[1].loss_mask)


def test_long_rows_are_cut_and_those_without_a_trained_token_left_out(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"segments": [["a" * 40, 0], ["b", 1]]}, {"segments": [["a", 0], ["b c d e f g", 1]]}])
    rows = load_sft_rows([path], tokenizer, 4)
    assert (len(rows), rows.skipped, rows[0].length) == (1, 1, 4)
    with pytest.raises(DataError, match="no rows to train on"):
        load_sft_rows([path], tokenizer, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"segments": [["a", 0]]}, "a.jsonl:1: no token of this row is trained"),
        ({"text": "a"}, "a.jsonl:1: expected .*neither 'segments' nor 'messages'"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "a.jsonl:1: .*role 'robot'"),
        (["a"], "a.jsonl row 1: expected an object"),
    ],
)
def test_bad_rows_are_named(tokenizer: Any, tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_sft_rows([write(tmp_path / "a.jsonl", [row])], tokenizer, 100)


def test_special_tokens_of_any_form_are_broken_up_or_refused(tokenizer: Any, tmp_path: Path) -> None:
    """As in rollouts; the tags of the wording are text, special or not."""
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.add_tokens([AddedToken("</s>", special=True), AddedToken("<tool_call>", special=True)])
    control = own.convert_tokens_to_ids("</s>")
    template = ChatTemplate(own, AgentLoopSettings())
    assert control not in template.prompt_ids(Problem("q", [{"role": "user", "content": "a</s>"}], ["4"]))
    assert control not in template.tool_response_ids(["a</s>"])
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    told = [{"role": "user", "content": "a</s>"}, call, {"role": "tool", "content": "</s>"}]
    (row,) = [load_sft_rows([write(tmp_path / "a.jsonl", [{"messages": told}])], own, 200)[0]]
    assert control not in row.input_ids and own.convert_tokens_to_ids("<tool_call>") in row.input_ids
    for said in ({"content": "a</s>"}, {"content": "", "tool_calls": [{"name": "f", "arguments": {"x": "</s>"}}]}):
        path = write(tmp_path / "a.jsonl", [{"messages": [told[0], {"role": "assistant", **said}]}])
        with pytest.raises(DataError, match="message 2 of 2 holds </s>, which would be trained as a control token"):
            load_sft_rows([path], own, 200)


def test_no_rows_at_all(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: no rows to train on; give files that hold some"):
        load_sft_rows([write(tmp_path / "a.jsonl", [])], tokenizer, 200)


def test_tiny_curriculum_keeps_its_order(built: TinyPaths, tokenizer: Any) -> None:
    phase = SFTPhaseSettings(name="copy", data_path="", steps=5, batch_size=8, lr=1e-3, shuffle=False)
    assert list(itertools.chain(*batches(400, phase, seed=3))) == list(range(40))
    assert len(load_sft_rows([built.copy], tokenizer, 640)) == 400
