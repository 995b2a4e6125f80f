"""Tools of a real MCP server, over its standard streams and over HTTP, through the agent loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.extension.user_code import FOLDERS
from rstar2_megatron.rollout.tool import CallContext, Malformed
from rstar2_megatron.rollout.tool_set import tools_of
from rstar2_megatron.services.process import free_port
from rstar2_megatron.settings.load import ConfigError, load, print_config
from rstar2_megatron.settings.schema import AgentLoopSettings, McpSettings
from rstar2_megatron.trajectory import FinishReason, ToolOutcome
from tests.rollout.test_own_tool import call, outcomes, run
from tests.rollout.written import ANSWER, PROBLEM, written

mcp = pytest.importorskip("mcp")

SERVER = f"""
import os, sys, time
sys.path.append({str(Path(mcp.__file__).parents[1])!r})
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError

server = MCPServer("test")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def refuse(word: str) -> str:
    "Refuse a word."
    raise ToolError("no " + word)

@server.tool()
def strict(code: int) -> str:
    "Answers with an error of the protocol."
    raise MCPError(code, "words have at most 3 letters")

@server.tool()
def wait(s: float) -> str:
    "Wait."
    time.sleep(s)
    return "waited"

@server.tool()
def variable(key: str) -> str:
    "A variable of the server's environment."
    return os.environ.get(key, "none")

@server.tool()
def die(word: str) -> str:
    "End the server."
    os._exit(3)

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture
def command(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    return f"{sys.executable} {tmp_path}/server.py"


def settings_of(server: str, **entry: Any) -> AgentLoopSettings:
    tools = [{"mcp": server, "timeout_s": 20, **entry}]
    keys = {"system_prompt": "{tools}", "user_prefix": "", "max_assistant_turns": 9}
    return AgentLoopSettings.model_validate({"tools": tools, **keys})


async def test_calls_of_a_server_that_is_started(tokenizer, command: str) -> None:
    settings = settings_of(command)
    trajectory, loop = await run(
        tokenizer, settings, call("add", a=2), call("refuse", word="x"), call("add", a="x"), call("add", b=2), timeout_s=60
    )
    assert trajectory.finish_reason is FinishReason.ANSWERED
    assert [outcome for outcome, _ in outcomes(trajectory)] == ["ok", "error", "malformed", "malformed"]
    texts = [text.removeprefix("Tool call failure\nreason: ") for _, text in outcomes(trajectory)]
    assert texts[0] == "3" and "no x" in texts[1]
    assert texts[2:] == ['Argument "a" must be of type integer, got string.', 'add needs the argument "a".']
    assert loop.template.schemas[0]["function"]["description"] == "Add two numbers."


async def test_a_server_that_dies_is_no_error_of_the_model_and_is_started_again(tokenizer, command: str) -> None:
    lost, loop = await run(tokenizer, settings_of(command), call("die", word="x"), timeout_s=60)
    assert lost.finish_reason is FinishReason.INFRASTRUCTURE and lost.num_tool_errors == 0
    assert f"the MCP server {command}: MCPError: " in lost.error
    written(loop).turns = [call("add", a=2), ANSWER]
    assert outcomes(await loop.run(PROBLEM, 1)) == [("ok", "3")]


async def test_errors_of_the_protocol_end_neither_the_connection_nor_other_calls(tokenizer, command: str) -> None:
    """-32602 says that the arguments are wrong (servers of other languages check them so); -32603 is the server's failure."""
    settings = settings_of(command)
    trajectory, loop = await run(tokenizer, settings, call("strict", code=-32602), timeout_s=60)
    assert outcomes(trajectory) == [("malformed", "Tool call failure\nreason: words have at most 3 letters")]
    wait, strict = loop.tools.tools["wait"], loop.tools.tools["strict"]
    context = CallContext(PROBLEM, loop.tools.judge, "")
    waiting = asyncio.create_task(wait.run({"s": 1.0}, context))
    await asyncio.sleep(0.2)
    for code, error in ((-32602, Malformed), (-32603, RuntimeError)):
        with pytest.raises(error, match="words have at most 3 letters"):
            await strict.run({"code": code}, context)
    assert await waiting == (ToolOutcome.OK, "waited")


async def test_the_command_counts_files_from_the_yaml_and_gets_the_environment(
    tokenizer, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_A_SERVICE", "x y")
    entry = {"mcp": f"{sys.executable} server.py"}
    keys = {"system_prompt": "{tools}", "user_prefix": "", "tools": [entry]}
    settings = AgentLoopSettings.model_validate(keys, context={FOLDERS: [tmp_path / "elsewhere", tmp_path]})
    trajectory, _ = await run(tokenizer, settings, call("variable", key="KEY_OF_A_SERVICE"), timeout_s=60)
    assert outcomes(trajectory) == [("ok", "x y")]
    assert settings.tools[0].mcp == command  # what is saved does not depend on where it was written


async def test_a_call_past_its_time(tokenizer, command: str) -> None:
    settings = settings_of(command, timeout_s=5, tools=["wait"])
    trajectory, _ = await run(tokenizer, settings, call("wait", s=0.0), call("wait", s=60.0), timeout_s=60)
    assert outcomes(trajectory) == [("ok", "waited"), ("timeout", "Tool call failure\nreason: wait took longer than 5 s")]


async def test_a_slow_start_is_no_timeout_of_the_model(tokenizer, command: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(f"import time\ntime.sleep(4)\n{SERVER}")
    trajectory, _ = await run(tokenizer, settings_of(f"{sys.executable} {slow}", timeout_s=3), call("add", a=2), timeout_s=60)
    assert outcomes(trajectory) == [("ok", "3")]


async def test_a_server_at_an_address(tokenizer, command: str) -> None:
    port = free_port("127.0.0.1")
    with subprocess.Popen([*command.split(), str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):
                try:
                    settings = settings_of(f"http://127.0.0.1:{port}/mcp", tools=["add"])
                    assert [tool.name for tool in tools_of(settings)] == ["add"]
                    break
                except ValueError:
                    time.sleep(0.2)
            trajectory, _ = await run(tokenizer, settings, call("add", a=2, b=40), timeout_s=60)
            assert outcomes(trajectory) == [("ok", "42")]
        finally:
            server.kill()


def test_a_server_is_named_in_a_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.yaml").write_text(
        "defaults: [rstar2-tiny-cpu, _self_]\nagentloop:\n  tools:\n    - python_code_with_standard_io\n"
        "    - { use: my_tools.py:f, timeout_s: 3 }\n    - { mcp: python server.py --fast, tools: [add], timeout_s: 10 }\n"
    )
    (tmp_path / "my_tools.py").write_text("def f(): ...")
    (tmp_path / "server.py").write_text(SERVER)
    settings = load(str(tmp_path / "my.yaml")).settings
    assert settings.agentloop.tools[2] == McpSettings(mcp=f"python {tmp_path}/server.py --fast", tools=["add"], timeout_s=10)
    monkeypatch.setenv("HOME", str(tmp_path))
    (at_home,) = load("rstar2-tiny-cpu", ["agentloop.tools=[{mcp: 'python ~/server.py'}]"]).settings.agentloop.tools
    assert at_home == McpSettings(mcp=f"python {tmp_path}/server.py")
    again = tmp_path / "again.yaml"
    again.write_text(print_config(settings))
    assert load(str(again)).settings == settings
    for entry, words in (
        ("{mcp: x, tool: [add]}", r"unknown key agentloop\.tools\.0\.tool; the nearest valid key is agentloop\.tools\.tools"),
        (
            "{use: 'f.py:f', timeout: 3}",
            r"unknown key agentloop\.tools\.0\.timeout; the nearest valid key is agentloop\.tools\.timeout_s",
        ),
        ("{mcp: '\"x'}", r"agentloop\.tools\.0\.mcp='\"x': no closing quotation"),
    ):
        with pytest.raises(ConfigError, match=words):
            load("rstar2-tiny-cpu", [f"agentloop.tools=[{entry}]"])


def test_servers_that_give_no_tools(command: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("print('no protocol')")
    for server in (f"{sys.executable} {tmp_path}/ends.py", "/no/such/command", "http://127.0.0.1:9/mcp"):
        with pytest.raises(ValueError, match=f"the MCP server {server} lists no tools: "):
            tools_of(settings_of(server))
    with pytest.raises(ValueError, match="has no tool 'sub'; it has add, refuse, strict, wait, variable, die"):
        tools_of(settings_of(command, tools=["sub"]))
