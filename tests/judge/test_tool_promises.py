"""What the descriptions of the tools promise a model happens: a call as the agent loop makes it for each sentence."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.rollout.tool_response import format_tool_response
from rstar2_megatron.tools import TOOL_SCHEMAS

# Description -> cells of one use of the tool: code, standard input, what the response holds.
Cell = tuple[str, str, str]
WRITES = "import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)"
PROMISES: dict[str, list[list[Cell]]] = {
    "Run Python code in a fresh process with the given standard input and return what it writes to standard output and "
    "standard error.": [
        [("import os\nx = 5\nopen('kept', 'w').close()", "", "success"), ("print(x)", "", "NameError")],
        [("open('kept', 'w').close()", "", "success"), ("open('kept')", "", "FileNotFoundError")],
        [("print(input() + input())", "a\nb\n", "stdout: ab\n")],
        [(WRITES, "", "stdout: to stdout\n"), (WRITES, "", "stderr: to stderr\n")],
    ],
    "The Python program to run.": [[("print(6 * 7)", "", "stdout: 42\n")]],
    "Text for standard input; may be empty.": [
        [("import sys\nprint(repr(sys.stdin.read()))", "some text", "stdout: 'some text'\n")],
        [("import sys\nprint(repr(sys.stdin.read()))", "", "stdout: ''\n")],
    ],
    "Run Python code in an interpreter that keeps its names and imports from call to call, and return what it writes and the "
    "value of its last expression.": [
        [("import math\nx = 2", "", "success"), ("print(math.factorial(x + 2))", "", "stdout: 24\n")],
        [("6 * 7", "", "stdout: 42\n"), ("print('said')\n6 * 7", "", "stdout: said\n42\n")],
        [(WRITES, "", "stdout: to stdout\n"), (WRITES, "", "stderr: to stderr\n")],
    ],
    "The code of the next cell.": [[("y = 1", "", "success"), ("y", "", "stdout: 1\n")]],
}


def descriptions(schema: Any) -> Iterator[str]:
    """All texts of a schema under the key description."""
    for key, value in schema.items():
        if key == "description" and isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from descriptions(value)


def test_every_description_is_here() -> None:
    assert {text for schema in TOOL_SCHEMAS.values() for text in descriptions(schema)} == set(PROMISES)


@pytest.mark.parametrize("name", TOOL_SCHEMAS)
async def test_what_a_tool_promises_happens(judge: JudgeService, name: str) -> None:
    has_session = '"input"' not in json.dumps(TOOL_SCHEMAS[name])
    async with JudgeClient(judge.url, time_limit_s=60.0) as client:
        for text in descriptions(TOOL_SCHEMAS[name]):
            for cells in PROMISES[text]:
                session = uuid.uuid4().hex if has_session else None
                for code, given, held in cells:
                    response = format_tool_response(await client.run(code, given, session=session))
                    assert held in response, (text, code, response)
                if session:
                    await client.close_session(session)
