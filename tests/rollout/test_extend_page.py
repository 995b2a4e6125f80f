"""What docs/extend.md says of tools and formats: its files are written, its commands run, its calls are read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from rstar2_megatron.extension.user_code import FOLDERS
from rstar2_megatron.rollout.call_format import PARSERS
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.rollout.tool_set import tools_of
from rstar2_megatron.runs.preflight import tool_problems
from rstar2_megatron.settings.load import load
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.trajectory import Problem
from rstar2_megatron.try_out import main
from tests.rollout.written import PROBLEM, make_loop

PAGE = (Path(__file__).parents[2] / "docs/extend.md").read_text()
TOOLS, FORMATS, DIALOGUE = (
    PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0] for name in ("Tools", "Tool-call formats", "Environment and loop")
)


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the page's files; the user stands there."""
    for text in blocks(TOOLS, "python"):
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands(folder: Path, tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    try_out, run = (shlex.split(line) for line in blocks(TOOLS, "bash")[0].replace("\\\n", " ").splitlines())
    assert try_out[:3] == ["python", "-m", "rstar2_megatron.try_out"] and main(try_out[3:]) == 0
    assert 'capital {"country": "Peru"}\n  ok in ' in capsys.readouterr().out
    settings = load(run[2], run[3:]).settings.agentloop
    ChatTemplate(tokenizer, settings).prompt_text(Problem("q", [{"role": "user", "content": "?"}], ["4"]))
    assert [tool.name for tool in tools_of(settings)] == ["python_code_with_standard_io", "capital"]


def test_limits_and_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = yaml.safe_load(blocks(TOOLS, "yaml")[0])["agentloop"]
    tool = tools_of(AgentLoopSettings.model_validate(written, context={FOLDERS: [folder]}))[1]
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["country"]
    servers = yaml.safe_load(blocks(TOOLS, "yaml")[1])["agentloop"]
    assert [entry.tools for entry in AgentLoopSettings.model_validate(servers).tools] == [["add"], None]  # type: ignore[union-attr]
    assert main(["my_counter.py:Counter", "--args", '{"by": 2}', "--args", '{"by": 3}']) == 0
    out = capsys.readouterr().out
    assert 'count {"by": 2}\n' in out and "    3\n" in out and "    6\n" in out


def test_the_formats() -> None:
    schema = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}}
    rows = re.findall(r"^\| `(\w+)`.*? \| (.*) \|$", FORMATS, re.MULTILINE)
    assert {name for name, _ in rows} == set(PARSERS)
    for name, cell in rows:
        for text in re.findall("`([^`]*)`", cell.replace("\\|", "|")):
            if "x" in text:
                (call,) = PARSERS[name](text, [schema])
                assert call.valid and call.arguments == {"x": 1}, text
    written = yaml.safe_load(blocks(FORMATS, "yaml")[0])["agentloop"]
    assert AgentLoopSettings.model_validate(written).tool_call_format == "auto"


def test_an_environment_is_tried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_game.py").write_text(blocks(DIALOGUE, "python")[0])
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(blocks(DIALOGUE, "bash")[1])[3:]) == 0
    assert "Double 3 until it is above 20." in (out := capsys.readouterr().out) and "ms: now 12\n" in out


async def test_environment_and_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer) -> None:
    for text in blocks(DIALOGUE, "python"):
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    done = []
    for command, turns in zip(blocks(DIALOGUE, "bash")[::2], (["8", "16", "32"], ["5", "4"])):
        words = shlex.split(command.replace("\\\n", " "))
        settings = load(words[2], words[3:]).settings
        assert list(tool_problems(settings)) == []
        chosen = {name: getattr(settings.agentloop, name) for name in ("environment", "environment_settings", "loop")}
        done.append(await make_loop(tokenizer, turns, **chosen).run(PROBLEM, 0))
    assert [(t.environment_reward, t.observations) for t in done] == [
        (1.0, ["now 4", "now 8", "now 16"]),
        (0.5, ["That is wrong. Try again."]),
    ]
