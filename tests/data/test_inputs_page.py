"""Every example of rows and calls in docs/inputs.md is what the page says, sentence by sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.data.train_set import Options, parse_source, process
from rstar2_megatron.rollout.tool_call import parse_tool_calls
from rstar2_megatron.sft.rows import load_sft_rows
from rstar2_megatron.tools import STANDARD_IO, tool_schemas

PAGE = Path(__file__).parents[2] / "docs" / "inputs.md"
CALL = f'<tool_call>{{"name": "{STANDARD_IO}", "arguments": {{"code": "print(1)", "input": ""}}}}</tool_call>'
FENCED = re.compile(r"`([^`]*)`")


def table(section: str) -> list[tuple[str, str]]:
    """(first cell, second cell) of the table of a section."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [(left.strip().replace("\\|", "|"), right.strip().replace("\\|", "|")) for left, right in rows[2:]]


def code(cell: str) -> str:
    found = FENCED.search(cell)
    assert found is not None, cell
    return found[1]


CALLED = [{"id": "c1", "name": "f", "arguments": {}}]


class Letters:
    """A tokenizer of one token a character, which keeps the control tokens of ChatML."""

    SPECIAL = ("<|im_start|>", "<|im_end|>")
    SPLIT = re.compile("|".join([*map(re.escape, SPECIAL), "."]), re.DOTALL)
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        pieces = [self.SPLIT.findall(text) for text in texts]
        self.names += [piece for text in pieces for piece in text if piece not in self.names]
        return {"input_ids": [[self.names.index(piece) for piece in text] for text in pieces]}


def sft_row(example: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The row of an example, and how a sentence about it begins."""
    if "role" not in example:
        return example, ""
    answer = [] if example["role"] == "assistant" else [{"role": "assistant", "content": "."}]
    asks = [{"role": "assistant", "content": "ask", "tool_calls": CALLED}] if example["role"] == "tool" else []
    messages = [{"role": "user", "content": "?"}, *asks, example, *answer]
    return {"messages": messages}, f"message {2 + len(asks)} of {len(messages)} "


@pytest.mark.parametrize(("example", "outcome"), table("SFT rows"))
def test_sft_rows(tmp_path: Path, example: str, outcome: str) -> None:
    row, begin = sft_row(json.loads(code(example)))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    tokenizer = Letters()
    said = code(outcome)
    if outcome.startswith("refused: "):
        with pytest.raises(DataError) as refused:
            load_sft_rows([path], tokenizer, 2000)
        assert str(refused.value) == f"{path}:1: {begin}{said}"
        return
    (rows,) = [load_sft_rows([path], tokenizer, 2000)[0]]
    said = said.replace("\\n", "\n") + ("" if "segments" in row else "<|im_end|>")
    pieces = [tokenizer.names[i] for i in rows.input_ids]
    trained = "".join(piece for piece, mask in zip(pieces, rows.loss_mask) if mask)
    if outcome.startswith("untrained "):
        assert said.removesuffix("<|im_end|>") in "".join(pieces) and trained.endswith(".<|im_end|>")
        assert trained == ".<|im_end|>" or trained.startswith("ask\n<tool_call>")
    else:
        assert outcome.startswith("trained ") and trained == said
        assert not ("reasoning" in example or "<think>" in example) or f"assistant\n<reason>{said}" in "".join(pieces)


@pytest.mark.parametrize(("example", "outcome"), table("Problem rows"))
def test_problem_rows(tmp_path: Path, example: str, outcome: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(code(example) + "\n")
    if outcome.startswith("refused: "):
        with pytest.raises(DataError) as refused:
            read_problems([path])
        assert str(refused.value) == f"{path}:1: {code(outcome)}"
    else:
        assert outcome.startswith("read as ")
        (problem,) = read_problems([path])
        expected = json.loads(code(outcome))
        assert {key: getattr(problem, key) for key in expected} == expected


def test_data_preparation(tmp_path: Path) -> None:
    """One conversion of all examples: each odd row is dropped and counted, none ends it."""
    path = tmp_path / "rows.jsonl"
    examples = table("Data preparation")
    rows = [code(example).replace("1+1", f"{number}+1") for number, (example, _) in enumerate(examples)]
    path.write_text("".join(row + "\n" for row in rows))
    report = process(parse_source(f"problems={path}"), tmp_path / "out", Options())
    kept = [code(outcome) for _, outcome in examples if outcome.startswith("kept: ")]
    written = read_problems([tmp_path / "out" / "train.jsonl"])
    assert sorted(problem.solutions[0] for problem in written) == sorted(kept)
    dropped = [code(outcome) for _, outcome in examples if outcome.startswith("dropped: ")]
    counts = report["sources"][str(path)]
    assert counts["dropped"] == {why: dropped.count(why) for why in dropped}
    first = [outcome for _, outcome in examples].index("dropped: `answer is no integer`") + 1
    assert counts["first_dropped"]["answer is no integer"] == f"{path}:{first}"
    assert len(kept) + len(dropped) == report["rows_in"] == len(examples)


@pytest.mark.parametrize(("example", "outcome"), table("Tool calls"))
def test_tool_calls(example: str, outcome: str) -> None:
    text = json.loads(example.strip("`") if example.startswith("`") else example)
    calls = parse_tool_calls(text.replace("CALL", CALL), tool_schemas([STANDARD_IO]))
    if outcome == "no call":
        assert calls == []
        return
    (call,) = calls
    if outcome.startswith("runs "):
        assert call.valid and call.arguments["code"] == code(outcome)
    else:
        assert outcome.startswith("refused: ") and not call.valid and call.message == code(outcome)
