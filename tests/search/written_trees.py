"""Tree files with real token ids, without a search: of each problem two first steps, each with two answers. What of a tree file
two searches must agree in."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.tree_file import TreeFile, tree_row
from rstar2_megatron.trajectory import FinishReason, Problem
from tests.e2e.runs import read_jsonl
from tests.search.scripted import drive, settings

PROMPT = "What is 12+5?"


def write_trees(path: Path, tokenizer: Any, count: int = 4, *, stray: int | None = None, **row: Any) -> Path:
    """A first step that says "good" leads to right answers mostly; `row` replaces keys of every row.

    stray: a token id put into every step, after its first token.
    """
    rng = random.Random(0)

    def step(text: str, **fields: Any) -> Step:
        ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        ids[1:1] = [] if stray is None else [stray]
        mask = np.ones(len(ids), np.uint8)
        return Step(text, np.array(ids, np.int32), mask, np.zeros(len(ids), np.float32), **fields)

    def answer(right: bool) -> Step:
        text = f"the result is {17 if right else rng.randint(20, 90)}"
        fields: dict[str, Any] = {"ending": FinishReason.ANSWERED, "answer": text}
        return step(text, reward=float(right), value=1.0 if right else -1.0, **fields)

    def propose(path: str) -> list[Step]:
        if not path:
            return [step("a good way: add them"), step("a bad way: guess the number")]
        return [answer("good" in path), answer("good" in path), answer(False)]

    file = TreeFile(path, {})
    problems = [Problem(f"q{i}", [{"role": "user", "content": PROMPT}], ["17"]) for i in range(count)]
    file.open(problems)
    for problem in problems:
        search = MCTS(settings(rollouts=9, depth=3))
        drive(search, propose)
        prompt_ids = tokenizer.encode(f"<|im_start|>user\n{PROMPT}", add_special_tokens=False)
        file.finish(json.loads(json.dumps({**tree_row(problem, search, "mcts", 0.1, prompt_ids), **row})))
    return path


def trees(path: Path) -> dict[str, Any]:
    """Nodes by query id, without what differs between equal trees: seconds, and log-probs in the last bits."""
    found = {}
    for row in read_jsonl(path):
        for node in row["nodes"]:
            if node["step"] is not None:
                del node["step"]["logprobs"]
                for call in node["step"]["tool_calls"]:
                    call["seconds"] = 0
        found[row["query_id"]] = row["nodes"]
    return found
