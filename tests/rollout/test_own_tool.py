"""Tools that a user has written, through the real agent loop; only the engine's turns are written down."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rstar2_megatron.extension.user_code import FOLDERS
from rstar2_megatron.rollout.agent_loop import AgentLoop
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.tool_set import tools_of
from rstar2_megatron.settings.load import ConfigError, load
from rstar2_megatron.settings.schema import AgentLoopSettings, SamplingParams
from rstar2_megatron.tools import STANDARD_IO
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory
from tests.rollout.written import ANSWER, ParkableEngine, WrittenEngine, WrittenJudge

NEWLINE = "\n"
HEAD = """
import asyncio, threading, time
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional
from rstar2_megatron.extension import ToolError
from rstar2_megatron.trajectory import Problem
"""
SEARCH = """
def search(query: str, limit: int = 2, kind: Optional[str] = None) -> list[str]:
    '''Find passages.

    Args:
        query: Words to look for.
        limit: Most passages.
        kind: Of the passages.
    '''
    if not query:
        raise ToolError("the query is empty; write some words")
    if query == "refuse":
        raise ToolError
    if query == "break":
        return {}["key"]
    if query == "leave":
        raise SystemExit(3)
    return [query] * limit
"""
COUNTER = """
LOG = []

class Counter:
    name = "count"

    def __init__(self, start: int) -> None:
        self.value = start
        LOG.append("made")

    def open(self, problem: Problem) -> None:
        self.value += problem.extra["more"]

    def __call__(self, by: int) -> int:
        '''Add to the counter.

        Args:
            by: How much.
        '''
        self.value += by
        return self.value

    async def close(self) -> None:
        LOG.append("closed")
"""
PROBLEM = Problem("q", [{"role": "user", "content": "?"}], ["4"], extra={"more": 100, "rows": ["a", "b"]})


def settings_of(folder: Path, code: str, *entries: Any, **keys: Any) -> AgentLoopSettings:
    """The entries' `own.py` holds `code`."""
    (folder / "own.py").write_text(f"{HEAD}{code}\n# {folder}\n")  # equal texts would be one module
    values = {"tools": list(entries), "system_prompt": "{tools}", "user_prefix": "", "max_assistant_turns": 9, **keys}
    return AgentLoopSettings.model_validate(values, context={FOLDERS: [folder]})


def call(name: str, **arguments: Any) -> str:
    return f"x</reason><tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def loop_of(tokenizer, settings: AgentLoopSettings, turns: list[Any], engine=WrittenEngine, timeout_s: float = 20) -> AgentLoop:
    template = ChatTemplate(tokenizer, settings)
    sampling, written = SamplingParams(max_new_tokens=3000), engine(tokenizer, list(turns))
    return AgentLoop(written, WrittenJudge(), template, settings, sampling, max_context_tokens=9000, timeout_s=timeout_s)


async def run(tokenizer, settings: AgentLoopSettings, *turns: str, **keys: Any) -> tuple[Trajectory, AgentLoop]:
    loop = loop_of(tokenizer, settings, [*turns, ANSWER], **keys)
    trajectory = await loop.run(PROBLEM, 0)
    trajectory.check()
    return trajectory, loop


def outcomes(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(str(call.outcome), call.response_text) for call in trajectory.tool_calls]


async def test_a_function_is_a_tool(tokenizer, tmp_path: Path) -> None:
    """Beside a built-in one; its schema is in the prompt, its result is JSON, its tokens are those of a fresh render."""
    settings = settings_of(tmp_path, SEARCH, STANDARD_IO, "own.py:search")
    trajectory, loop = await run(
        tokenizer, settings, call("search", query="a b", limit=1), call(STANDARD_IO, code="print(4)", input="")
    )
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert outcomes(trajectory)[0] == ("ok", '["a b"]') and outcomes(trajectory)[1][1].startswith(
        "Tool call success\nstdout: 4"
    )
    function = loop.template.schemas[1]["function"]
    assert function["description"] == "Find passages." and function["parameters"]["required"] == ["query"]
    assert "return" not in function and '"description": "Most passages."' in loop.template.prompt_text(PROBLEM)
    responses = [[done.response_text] for done in trajectory.tool_calls]
    whole = "".join(text for text, _ in loop.template.conversation(PROBLEM, trajectory.assistant_texts, responses))
    assert [*trajectory.prompt_ids, *trajectory.response_ids] == tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize(
    ("arguments", "outcome", "text"),
    [
        ({"query": "a", "limit": 1, "kind": None}, "ok", '["a"]'),
        ({"query": "ä" * 400}, "ok", '["' + "ä" * 126 + "...(truncated)..." + "ä" * 126 + '"]'),
        ({"query": ""}, "error", "Tool call failure\nreason: the query is empty; write some words"),
        ({"query": "refuse"}, "error", "Tool call failure\nreason: the tool gave no reason"),
        ({}, "malformed", 'Tool call failure\nreason: search needs the argument "query".'),
        ({"query": "a", "limit": "two"}, "malformed", 'reason: Argument "limit" must be of type integer, got string.'),
    ],
)
async def test_what_the_model_did(tokenizer, tmp_path: Path, arguments: dict[str, Any], outcome: str, text: str) -> None:
    trajectory, loop = await run(tokenizer, settings_of(tmp_path, SEARCH, "own.py:search"), call("search", **arguments))
    ((seen, response),) = outcomes(trajectory)
    assert seen == outcome and response.endswith(text) and trajectory.usable
    sums = loop.stats.sums()
    assert sums["tool/search/calls"] == 1 and sums["tool/search/errors"] == (outcome != "ok")
    assert sums["tool/search/seconds"] == trajectory.tool_calls[0].seconds


async def test_arguments_are_validated_to_their_depth(tokenizer, tmp_path: Path) -> None:
    code = """
@dataclass
class Point:
    x: int

def draw(points: list[Point], colour: Literal["red", "blue"], anything: Any = None) -> int:
    '''Draw.

    Args:
        points: Where.
        colour: Which.
        anything: Else.
    '''
    return sum(point.x for point in points)
"""
    settings = settings_of(tmp_path, code, "own.py:draw", max_parallel_calls=4)
    turn = "".join(
        call("draw", points=points, colour=colour, anything=[1])
        for points, colour in (([{"x": 1}, {"x": 2}], "red"), ([{"x": 1}, {"x": "y"}], "red"), ([], "green"))
    )
    trajectory, _ = await run(tokenizer, settings, turn)
    refused = "Tool call failure\nreason: Argument "
    assert outcomes(trajectory) == [
        ("ok", "3"),
        (
            "malformed",
            f'{refused}"points.1.x": input should be a valid integer, unable to parse string as an integer, got string.',
        ),
        ("malformed", f"{refused}\"colour\": input should be 'red' or 'blue', got string."),
    ]


async def test_a_tool_that_cancels_its_own_task_costs_its_trajectory_alone(tokenizer, tmp_path: Path) -> None:
    """It is handed over: nobody would wait for it otherwise."""
    code = """
async def leave(x: int) -> str:
    '''Leave.

    Args:
        x: Any number.
    '''
    asyncio.current_task().cancel()
    return "x"
"""
    loop = loop_of(tokenizer, settings_of(tmp_path, code, "own.py:leave"), [call("leave", x=1)])
    trajectory = await asyncio.create_task(loop.run(PROBLEM, 0))
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and trajectory.user_error


def test_a_schema_is_written_as_models_have_read_it(tmp_path: Path) -> None:
    """`type` first, as transformers' template helpers write it; what the description says of examples stays."""
    code = """
def f(a: list[str], b: Optional[dict] = None, c: int | str | None = None) -> str:
    '''Find.

    Example:
        Quote phrases.

    Args:
        a: A.
        b: B.
        c: C.
    '''

def g(x: Annotated[str, "X."]) -> str:
    '''Find.

    Examples:
        Quote phrases.
    :math:`x` is a text.
    '''
"""
    first, second = (one.schema["function"] for one in tools_of(settings_of(tmp_path, code, "own.py:f", "own.py:g")))
    assert json.dumps(first["parameters"]["properties"]) == (
        '{"a": {"type": "array", "items": {"type": "string"}, "description": "A."}, '
        '"b": {"type": "object", "nullable": true, "description": "B."}, '
        '"c": {"anyOf": [{"type": "integer"}, {"type": "string"}], "nullable": true, "description": "C."}}'
    )
    assert first["description"] == "Find.\n\nExample:\n    Quote phrases."
    assert second["description"] == "Find.\n\nExamples:\n    Quote phrases.\n:math:`x` is a text."


async def test_types_beyond_json_are_described_and_read(tokenizer, tmp_path: Path) -> None:
    code = """
from datetime import date
from enum import Enum

class Tone(Enum):
    LOW = "low"
    HIGH = "high"

def play(tones: list[Tone], words: set[str], when: Optional[date] = None) -> str:
    '''Play.

    Args:
        tones (list of Tone): Which.
        words (set[str], optional): Words.
        when (date): The day.
    '''
    return f"{[tone.name for tone in tones]} {sorted(words)} {when and when.year}"
"""
    settings = settings_of(tmp_path, code, "own.py:play", max_parallel_calls=3)
    turn = "".join(
        call("play", tones=tones, words=["b", "a", "b"], when=when)
        for tones, when in ((["low", "high"], "2026-11-27"), (["loud"], None), ([], "soon"))
    )
    trajectory, loop = await run(tokenizer, settings, turn)
    refused = "Tool call failure\nreason: Argument "
    assert outcomes(trajectory) == [
        ("ok", "['LOW', 'HIGH'] ['a', 'b'] 2026"),
        ("malformed", f"{refused}\"tones.0\": input should be 'low' or 'high', got string."),
        ("malformed", f'{refused}"when": input should be a valid date or datetime, input is too short, got string.'),
    ]
    properties = loop.template.schemas[0]["function"]["parameters"]["properties"]
    assert [one["description"] for one in properties.values()] == ["Which.", "Words.", "The day."]
    assert properties["tones"]["$defs"]["Tone"]["enum"] == ["low", "high"] and properties["words"]["type"] == "array"
    assert properties["when"] == {"format": "date", "type": "string", "nullable": True, "description": "The day."}


async def test_a_strict_type_is_read_from_json(tokenizer, tmp_path: Path) -> None:
    code = """
import datetime
from typing import Annotated
from pydantic import Strict

def step(day: Annotated[datetime.date, Strict()], at: Annotated[tuple[int, int], Strict()]):
    'Go.'
    return f"{day.year} {at}"
"""
    settings = settings_of(
        tmp_path, code.replace("'Go.'", "'''Go.\n\n    Args:\n        day: D.\n        at: A.\n    '''"), "own.py:step"
    )
    trajectory, _ = await run(tokenizer, settings, call("step", day="2026-11-29", at=[1, 2]))
    assert outcomes(trajectory) == [("ok", "2026 (1, 2)")]


async def test_a_description_may_have_colons_and_further_sections(tokenizer, tmp_path: Path) -> None:
    code = """
def find(query: str, limit: int = 3) -> str:
    '''Find passages.

    Args:
        query (str): Words to look for.
            Note: no operators.

            query: is not repeated.
        limit: Most passages.

    Example:
        limit: 7
    '''
    return query
"""
    function = loop_of(tokenizer, settings_of(tmp_path, code, "own.py:find"), [ANSWER]).template.schemas[0]["function"]
    words = {name: one["description"] for name, one in function["parameters"]["properties"].items()}
    assert function["description"] == "Find passages."
    assert words == {"query": "Words to look for. Note: no operators. query: is not repeated.", "limit": "Most passages."}


STYLES = {
    "Google": """Args:
        query (dict[str, int]): Words to
            look for: all.
        a:
            Times.
        b: Times.

    Returns:
        a: 7""",
    "Google's other header": """Parameters:
        query: Words to look for: all.
        a (int): Times.
        b (Optional[int], optional): Times.""",
    "NumPy": """Parameters
    ----------
    query : str
        Words to

        look for: all.
    a, b : int, optional
        Times.

    Returns
    -------
    str
        a: 7""",
    "NumPy without types": """Parameters
    ----------
    query
        Words to look for: all.
    a
        Times.
    b
        Times.""",
    "Sphinx": """:param query: Words to
        look for: all.
    :type query: str
    :param int a: Times.
    :param dict[str, int] b:
        Times.
    :returns: a: 7
    :rtype: str""",
    "with bullets": """Args:
        - query (str): Words to look for: all.
        * a: Times.
        b: Times.""",
    "Sphinx's other word": """:arg query: Words to look for: all.
    :argument int a: Times.
    :parameter b: Times.
    :raises KeyError: never""",
    "Epydoc": """@param query: Words to look for: all.
    @param a: Times.
    @param b: Times.
    @return: a: 7""",
}


@pytest.mark.parametrize("style", STYLES)
def test_docstrings_of_every_style_describe_the_parameters(tmp_path: Path, style: str) -> None:
    doc = f"Find passages.\n\n    Of any kind.\n\n    {STYLES[style]}\n    "
    code = f"def find(query: str, a: int = 1, b: int = 2) -> str:\n    '''{doc}'''"
    function = tools_of(settings_of(tmp_path, code, "own.py:find"))[0].schema["function"]
    words = {name: one["description"] for name, one in function["parameters"]["properties"].items()}
    assert function["description"] == "Find passages.\n\nOf any kind."
    assert words == {"query": "Words to look for: all.", "a": "Times.", "b": "Times."}


async def test_a_validator_that_fails_is_the_users_code(tokenizer, tmp_path: Path) -> None:
    code = """
from typing import Annotated
from pydantic import AfterValidator

def positive(value: int) -> int:
    return {1: 1}[value]

def draw(width: Annotated[int, AfterValidator(positive)]) -> int:
    '''Draw.

    Args:
        width: Pixels.
    '''
    return width
"""
    trajectory, _ = await run(tokenizer, settings_of(tmp_path, code, "own.py:draw"), call("draw", width=2))
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and trajectory.user_error == "KeyError"
    assert "argument 'width' of own.py:draw: " in trajectory.error and "in positive: KeyError: 2" in trajectory.error


SQLITE = """
import sqlite3, threading

class Table:
    def __init__(self) -> None:
        self.rows, self.threads = sqlite3.connect(":memory:"), {threading.get_ident()}

    def open(self) -> None:
        self.rows.execute("create table t (x)")

    def __call__(self, x: int) -> str:
        '''Add a row.

        Args:
            x: Its value.
        '''
        self.threads.add(threading.get_ident())
        self.rows.execute("insert into t values (?)", (x,))
        return f"{self.rows.execute('select sum(x) from t').fetchone()[0]} in {len(self.threads)} thread"

    def close(self) -> None:
        self.rows.close()
"""


async def test_an_instance_has_one_thread_for_all_its_calls(tokenizer, tmp_path: Path) -> None:
    """sqlite3 refuses a connection that another thread made."""
    before = threading.active_count()
    settings = settings_of(tmp_path, SQLITE, "own.py:Table", max_parallel_calls=2)
    trajectory, _ = await run(tokenizer, settings, call("Table", x=1), call("Table", x=2) + call("Table", x=3))
    assert [text for _, text in outcomes(trajectory)] == ["1 in 1 thread", "3 in 1 thread", "6 in 1 thread"]
    assert not trajectory.user_error, trajectory.error
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:  # it ends with its instance
        await asyncio.sleep(0.01)
    assert threading.active_count() == before


async def test_a_call_that_hangs_keeps_one_place_alone(tokenizer, tmp_path: Path) -> None:
    """What comes behind it in the same thread does not wait, and other trajectories go on."""
    code = """
class Slow:
    def __call__(self, s: float) -> str:
        '''Wait.

        Args:
            s: Seconds.
        '''
        time.sleep(s)
        return "done"

    def close(self) -> None: ...
"""
    settings = settings_of(tmp_path, code, {"use": "own.py:Slow", "timeout_s": 0.3, "max_concurrency": 2})
    loop = loop_of(tokenizer, settings, [call("Slow", s=30), call("Slow", s=0), ANSWER, call("Slow", s=0), ANSWER])
    hung, other = await loop.run(PROBLEM, 0), await loop.run(PROBLEM, 1)
    assert [outcome for outcome, _ in outcomes(hung)] == ["timeout", "timeout"] and hung.finish_reason is FinishReason.ANSWERED
    assert "an earlier call of Slow still runs" in outcomes(hung)[1][1] and "was not closed" in hung.error
    assert outcomes(other) == [("ok", "done")]


async def test_a_close_that_fails_is_told_and_drops_nothing(tokenizer, tmp_path: Path) -> None:
    code = COUNTER.replace('LOG.append("closed")', 'raise OSError("the file is gone")')
    settings = settings_of(tmp_path, code, {"use": "own.py:Counter", "settings": {"start": 1}})
    trajectory, _ = await run(tokenizer, settings, call("count", by=1))
    assert trajectory.finish_reason is FinishReason.ANSWERED and outcomes(trajectory) == [("ok", "102")]
    assert trajectory.user_error == "OSError" and "in close: OSError: the file is gone" in trajectory.error


async def test_a_field_of_annotated_describes_and_limits_its_parameter(tokenizer, tmp_path: Path) -> None:
    """As in tools for MCP; a line of the docstring comes before it. A bare list is an array."""
    code = """
from typing import Annotated
from pydantic import BaseModel, Field

class Point(BaseModel):
    'A place.'
    x: Annotated[int, Field(ge=0)]

def draw(
    width: Annotated[int, Field(ge=1, description="In pixels.")],
    at: Point,
    colours: list = None,
    depth: Annotated[int, Field(le=9, description="Unused.")] = 1,
    title: Annotated[str, "Above it."] = "",
):
    '''Draw.

    Args:
        colours: Names.
        depth: Bits.
    '''
    return {"at": at, "colours": colours, "kinds": {width}}
"""
    settings = settings_of(tmp_path, code, "own.py:draw", max_parallel_calls=4)
    given = ({"width": 2, "colours": ["red"]}, {"width": 0}, {"width": 1, "depth": 10}, {"width": 1, "colours": {}})
    trajectory, loop = await run(tokenizer, settings, "".join(call("draw", at={"x": 3}, **one) for one in given))
    refused = "Tool call failure\nreason: Argument "
    assert outcomes(trajectory) == [
        ("ok", '{"at": {"x": 3}, "colours": ["red"], "kinds": [2]}'),
        ("malformed", f'{refused}"width": input should be greater than or equal to 1, got number.'),
        ("malformed", f'{refused}"depth": input should be less than or equal to 9, got number.'),
        ("malformed", f'{refused}"colours" must be of type array, got object.'),
    ]
    form = loop.template.schemas[0]["function"]["parameters"]
    words = {name: one["description"] for name, one in form["properties"].items()}
    assert words == {"width": "In pixels.", "at": "A place.", "colours": "Names.", "depth": "Bits.", "title": "Above it."}
    assert form["required"] == ["width", "at"] and form["properties"]["width"]["minimum"] == 1


@pytest.mark.parametrize(("query", "said"), [("break", "KeyError: 'key'"), ("leave", "SystemExit: 3")])
async def test_failing_user_code_drops_the_trajectory(tokenizer, tmp_path: Path, query: str, said: str) -> None:
    """It is no error of the model; the user's line and the type are kept."""
    trajectory, _ = await run(tokenizer, settings_of(tmp_path, SEARCH, "own.py:search"), call("search", query=query))
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE and trajectory.num_tool_errors == 0
    before = (tmp_path / "own.py").read_text().partition({"break": "return {}", "leave": "raise SystemExit"}[query])[0]
    assert trajectory.error == f"tool own.py:search failed: {tmp_path}/own.py:{before.count(NEWLINE) + 1}, in search: {said}"
    assert trajectory.user_error == said.partition(":")[0]


async def test_what_no_model_can_read_is_a_fault_of_the_tool(tokenizer, tmp_path: Path) -> None:
    code = (
        "def odd(x: int):\n    '''Odd.\n\n    Args:\n        x: Number.\n    '''\n    import numpy as np\n"
        "    array = {'n': np.int64(2), 'rows': np.array([[1.5]], np.float32), 'all': np.bool_(True)}\n"
        "    return [b'', object(), '\\ud800x', array][x]\n"
    )
    settings = settings_of(tmp_path, code, "own.py:odd")
    trajectory, _ = await run(tokenizer, settings, call("odd", x=3))
    assert outcomes(trajectory) == [("ok", '{"n": 2, "rows": [[1.5]], "all": true}')]
    trajectory, _ = await run(tokenizer, settings, call("odd", x=1))
    assert "own.py:odd returned a object, which is not JSON" in trajectory.error
    trajectory, _ = await run(tokenizer, settings, call("odd", x=2))
    assert outcomes(trajectory) == [("ok", "?x")]


SLOW = """
GO = threading.Event()

def slow(s: float) -> str:
    '''Wait.

    Args:
        s: Seconds.
    '''
    if s < 0:
        raise TimeoutError("of the user's own")
    GO.wait(s)
    return "done"

async def wait(s: float) -> str:
    '''Wait.

    Args:
        s: Seconds.
    '''
    await asyncio.sleep(s)
    return "done"
"""


@pytest.mark.parametrize("name", ["slow", "wait"])
async def test_a_call_past_its_time_is_a_timeout_of_the_model(tokenizer, tmp_path: Path, name: str) -> None:
    settings = settings_of(tmp_path, SLOW, {"use": f"own.py:{name}", "timeout_s": 1.0})
    trajectory, _ = await run(tokenizer, settings, call(name, s=30.0), call(name, s=0.0))
    assert outcomes(trajectory) == [("timeout", f"Tool call failure\nreason: {name} took longer than 1 s"), ("ok", "done")]


async def test_the_users_own_timeout_error_is_none_of_the_tools_limits(tokenizer, tmp_path: Path) -> None:
    trajectory, _ = await run(tokenizer, settings_of(tmp_path, SLOW, "own.py:slow"), call("slow", s=-1.0))
    assert "TimeoutError: of the user's own" in trajectory.error and trajectory.user_error == "TimeoutError"


async def test_calls_that_never_end_are_named(tokenizer, tmp_path: Path) -> None:
    """They keep their places, so that later calls cannot begin: the infrastructure's failure, and not the model's."""
    settings = settings_of(tmp_path, SLOW, {"use": "own.py:slow", "timeout_s": 0.01, "max_concurrency": 1})
    trajectory, _ = await run(tokenizer, settings, call("slow", s=30.0), call("slow", s=0.0), timeout_s=2.0)
    assert trajectory.finish_reason is FinishReason.INFRASTRUCTURE
    assert "deadline passed in own.py:slow, of which 1 calls were running (max_concurrency=1)" in trajectory.error


async def test_no_more_calls_than_allowed_run_together(tokenizer, tmp_path: Path) -> None:
    code = """
NOW, MOST, LOCK = [0], [0], threading.Lock()

def step(x: int) -> int:
    '''Step.

    Args:
        x: Number.
    '''
    with LOCK:
        NOW[0] += 1
        MOST[0] = max(MOST[0], NOW[0])
    time.sleep(0.05)
    with LOCK:
        NOW[0] -= 1
    return MOST[0]
"""
    settings = settings_of(tmp_path, code, {"use": "own.py:step", "max_concurrency": 3}, max_parallel_calls=12)
    trajectory, _ = await run(tokenizer, settings, "".join(call("step", x=i) for i in range(12)))
    assert len(trajectory.tool_calls) == 12 and max(int(text) for _, text in outcomes(trajectory)) == 3


async def test_the_problem_and_settings_are_not_the_models(tokenizer, tmp_path: Path) -> None:
    code = """
async def look(i: int, row: Problem, problem, unit: str = "") -> str:
    '''Look.

    Args:
        i: Which row.
    '''
    assert row is problem
    return problem.extra["rows"].pop(i) + unit
"""
    settings = settings_of(tmp_path, code, {"use": "own.py:look", "settings": {"unit": " m"}, "max_length": 16})
    look = call("look", i=1, unit="!", problem="?")
    trajectory, loop = await run(tokenizer, settings, look, look)
    assert outcomes(trajectory) == [("ok", "b m")] * 2  # each call has its own copy
    assert list(loop.template.schemas[0]["function"]["parameters"]["properties"]) == ["i"]


async def test_a_class_has_an_instance_for_each_trajectory(tokenizer, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, COUNTER, {"use": "own.py:Counter", "settings": {"start": 1}}, max_parallel_calls=3)
    loop = loop_of(tokenizer, settings, [call("count", by=1)] * 3 + [call("count", by=2) + call("count", by=3)] * 3 + [ANSWER])
    done = await asyncio.gather(*(loop.run(PROBLEM, i) for i in range(3)))
    assert [[text for _, text in outcomes(t)] for t in done] == [["102", "104", "107"]] * 3
    log = settings.tools[0].use.load().close.__globals__["LOG"]  # type: ignore[union-attr]
    assert sorted(log) == ["closed"] * 3 + ["made"] * 3 and all(t.session == "" for t in done)
    assert written_judge(loop).closed == []  # it has nothing of theirs


def written_judge(loop: AgentLoop) -> WrittenJudge:
    assert isinstance(loop.tools.judge, WrittenJudge)
    return loop.tools.judge


async def test_state_lives_through_a_preemption_and_is_made_again_elsewhere(tokenizer, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, COUNTER, {"use": "own.py:Counter", "settings": {"start": 1}})
    loop = loop_of(tokenizer, settings, [call("count", by=1), call("count", by=2), ANSWER], ParkableEngine)
    engine = loop.engine
    assert isinstance(engine, ParkableEngine)
    loop.parking = False
    task = asyncio.create_task(loop.run(PROBLEM, 0))
    while len(engine.seen) < 2:
        await asyncio.sleep(0)
    loop.parking = True
    engine.aborting.set()
    parked = await task
    assert parked.finish_reason is None and parked.session
    elsewhere = loop_of(tokenizer, settings, [call("count", by=2), ANSWER])  # another process has other tools
    copy = Trajectory(
        "q", 0, **{n: getattr(parked, n) for n in Trajectory.ARRAYS}, assistant_texts=list(parked.assistant_texts)
    )
    copy.tool_calls, copy.calls_per_turn = list(parked.tool_calls), list(parked.calls_per_turn)
    copy.session = parked.session
    copy.response_ids = copy.response_ids[: parked.open_turn]
    copy.loss_mask, copy.rollout_logprobs = copy.loss_mask[: parked.open_turn], copy.rollout_logprobs[: parked.open_turn]
    loop.parking = False
    engine.aborting.clear()
    log = settings.tools[0].use.load().close.__globals__["LOG"]  # type: ignore[union-attr]
    log.clear()
    here = await loop.run(PROBLEM, 0, resume=parked)
    assert [text for _, text in outcomes(here)] == ["102", "104"] and log == ["closed"]
    there = await elsewhere.run(PROBLEM, 0, resume=copy)
    assert [text for _, text in outcomes(there)] == ["102", "104"] and log == ["closed", "made", "closed"]


DOC = '\n    """F.\n\n    Args:\n        x: X.\n    """'
REFUSED = {
    "no docstring": ("def f(x: int): ...", "f", "has no docstring; write what the tool does, and under `Args:`"),
    "no Args line": (
        "def f(x: int, y: int):\n    '''F.\n\n    Args:\n        x: X.\n    '''",
        "f",
        "no line `y: what it is` under `Args:`",
    ),
    "no type": ("def f(x):\n    '''F.'''", "f", "parameter 'x' of own.py:f has no type; write e.g. `x: str`"),
    "*args": ("def f(*words: str):\n    '''F.'''", "f", "takes `*words: str`, which no model can fill by name"),
    "unknown type": ("def f(x: 'Nowhere'):\n    '''F.'''", "f", "cannot be read: name 'Nowhere' is not defined"),
    "a set of types": ("def f(x: 'set[type]'):\n    '''F.\n\n    Args:\n        x: X.\n    '''", "f", "which no JSON fits"),
    "a name with a space": (
        "class F:\n    name = 'my tool'\n    def __call__(self):\n        '''F.'''",
        "F",
        "has the name 'my tool'; a tool's name is of letters, digits, _, - and .",
    ),
    "no docstring of the call": (
        "class F:\n    '''F.'''\n    def __call__(self): ...",
        "F",
        "__call__ of own.py:F has no docstring; write what the tool does",
    ),
    "a name that is a property": (
        "class F:\n    @property\n    def name(self): return 'f'\n    def __call__(self):\n        '''F.'''",
        "F",
        "own.py:F has the name <property object",
    ),
    "no tool": ("f = 3", "f", "own.py:f is a int; a tool is a function, or a class with __call__"),
    "no __call__": ("class F:\n    '''F.'''", "F", "is a class without __call__"),
    "a Field as default": (
        f"from pydantic import Field\ndef f(x: int = Field(5, description='X')):{DOC}",
        "f",
        "a Field in place of its default; write `x: Annotated[int, Field(...)]`, and behind it `= ` and the default",
    ),
    "a type of no expression": (f"def f(x: 'the query'):{DOC}", "f", "cannot be read: Forward reference must be an expression"),
    "a name that is missing": (f"def f(x: 'time.foo'):{DOC}", "f", "cannot be read: module 'time' has no attribute 'foo'"),
    "a model of an unknown type": (
        f"from pydantic import BaseModel\nclass Node(BaseModel):\n    kids: 'list[Nod]'\ndef f(x: Node):{DOC}",
        "f",
        "parameter 'x' of own.py:f has the type Node, of which no schema can be made: ",
    ),
    "problem is no text": (
        "def f(problem: str):\n    '''F.'''",
        "f",
        "gets the Problem, which the model does not see, and has the type str; rename it where the model is to write it",
    ),
    "abstract": (
        "import abc\nclass F(abc.ABC):\n    @abc.abstractmethod\n    def more(self): ...\n"
        "    def __call__(self):\n        '''F.'''",
        "F",
        "own.py:F is an abstract class; write its more",
    ),
    "a wrapper of async": (
        "import functools\nasync def g():\n    '''F.'''\n@functools.wraps(g)\ndef f(*words): return g(*words)",
        "f",
        "it wraps an async function and is none itself; write the wrapper as `async def`",
    ),
    "a generator": ("def f():\n    '''F.'''\n    yield 1", "f", "it is a generator; return the result in place of `yield`"),
    "open": (
        "class F:\n    def open(self, row): ...\n    def __call__(self):\n        '''F.'''",
        "F",
        "open of own.py:F takes self, or self and problem: missing a required argument: 'row'",
    ),
    "close": (
        "class F:\n    def close(self, problem): ...\n    def __call__(self):\n        '''F.'''",
        "F",
        "close of own.py:F takes self alone: missing a required argument: 'problem'",
    ),
    "settings": (
        COUNTER,
        "Counter",
        "the settings of own.py:Counter do not fit its parameters: missing a required argument: 'start'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_tool_is_refused_with_a_remedy(tmp_path: Path, case: str) -> None:
    code, name, words = REFUSED[case]
    settings = settings_of(tmp_path, code, f"own.py:{name}")
    with pytest.raises(ValueError, match=r"own\.py") as refused:
        tools_of(settings)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_docstring_is_inherited(tmp_path: Path) -> None:
    code = f"{COUNTER}\nclass Twice(Counter):\n    def __call__(self, by: int) -> int: return super().__call__(2 * by)\n"
    entry = {"use": "own.py:Twice", "settings": {"start": 1}}
    assert tools_of(settings_of(tmp_path, code, entry))[0].schema["function"]["description"] == "Add to the counter."


async def test_open_and_close_may_be_values_and_the_problem_optional(tokenizer, tmp_path: Path) -> None:
    code = (
        "class Door:\n    def __init__(self): self.open = self.close = True\n"
        "    def __call__(self, problem: Optional[Problem] = None):\n"
        "        '''Look.'''\n        return [self.open, problem.query_id]"
    )
    trajectory, _ = await run(tokenizer, settings_of(tmp_path, code, "own.py:Door"), call("Door"))
    assert outcomes(trajectory) == [("ok", '[true, "q"]')]


def test_the_return_type_is_not_read(tmp_path: Path) -> None:
    """Its module may be imported for type checkers alone."""
    code = SEARCH.replace("list[str]:", "'pandas.DataFrame':")
    assert tools_of(settings_of(tmp_path, code, "own.py:search"))[0].name == "search"


def test_two_tools_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two tools of the name 'search'; rename the function, or leave one out"):
        tools_of(settings_of(tmp_path, SEARCH, "own.py:search", {"use": "own.py:search", "timeout_s": 1}))


def test_settings_that_are_no_tool_are_refused(tmp_path: Path) -> None:
    for entry, words in (
        ({"timeout_s": 1}, "Field required"),
        ({"use": "f"}, "neither path/to/file.py:name nor"),
        (3, "valid dictionary"),
    ):
        with pytest.raises(ValidationError, match=words):
            settings_of(tmp_path, SEARCH, entry)


def test_a_refused_entry_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SEARCH)
    with pytest.raises(ConfigError, match=r"^agentloop\.tools\.1\.timeout_s=-1: "):
        load("rstar2-tiny-cpu", [f"agentloop.tools=[{STANDARD_IO}, {{use: '{tmp_path}/own.py:search', timeout_s: -1}}]"])


def test_settings_travel(tmp_path: Path) -> None:
    """As the saved configuration has them, they are read again; the code comes along."""
    settings = settings_of(tmp_path, SEARCH, STANDARD_IO, "own.py:search")
    again = AgentLoopSettings.model_validate(settings.model_dump(mode="json"))
    assert again == settings and again.tools[0] == STANDARD_IO
    assert [tool.name for tool in tools_of(again)] == [STANDARD_IO, "search"]


async def test_an_instance_that_does_not_open_in_time_is_no_error_of_the_model(tokenizer, tmp_path: Path) -> None:
    code = COUNTER.replace("self.value += problem", "threading.Event().wait()\n        self.value += problem")
    entry = {"use": "own.py:Counter", "settings": {"start": 1}, "timeout_s": 0.05}
    trajectory, _ = await run(tokenizer, settings_of(tmp_path, code, entry), call("count", by=1))
    assert trajectory.error == "tool own.py:Counter was not open within 0.05 s" and trajectory.user_error == "Timeout"
    assert trajectory.num_tool_errors == 0 and trajectory.session == ""


def test_an_mcp_server_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(
        ValueError, match=r"python x\.py is an MCP server, and the package mcp is not installed; run .venv/bin/pip install -c "
    ):
        tools_of(AgentLoopSettings.model_validate({"tools": [{"mcp": "python x.py"}]}))
