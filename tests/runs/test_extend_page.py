"""What docs/extend.md shows is pasted into files, loaded as a run would, and tried."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.runs.preflight import algorithm_code_problems, user_code_problems
from rstar2_megatron.settings.load import load, unknown_keys
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.try_out import main
from tests.e2e.runs import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text()


def paste(section: str, folder: Path) -> Settings:
    """The files of a section, whose first line names them; returns the settings of its YAML."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        named = re.match(r"# (\S+)\n", block)
        (folder / (named[1] if named else {"jsonl": "problems.jsonl"}.get(kind, "check.py"))).write_text(block)
    (path,) = folder.glob("*.yaml")
    return load(str(path), []).settings


def test_the_data_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = paste("Data", tmp_path)
    monkeypatch.chdir(tmp_path)
    (problem,) = read_problems(settings.data.train_data_paths, settings.data)
    assert problem.prompt[0]["content"] == "Ann has 17 boxes of 12 pens. How many pens?"
    assert (problem.solutions, problem.extra) == (["204"], {"level": 2})


def test_the_examples_of_data_and_loss(tmp_path: Path) -> None:
    settings = load(str(ROOT / "examples" / "extend" / "own_data.yaml"), []).settings
    problems = read_problems([ROOT / "examples" / "extend" / "own_data.csv"], settings.data)
    assert len(problems) == 60 and {problem.extra["operation"] for problem in problems} == {"product", "gcd"}
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1?", "solutions": ["2"]}')  # as tiny:heldout is
    assert read_problems([tmp_path / "held_out.jsonl"], settings.data)[0].solutions == ["2"]
    algorithm = load(str(ROOT / "examples" / "extend" / "own_loss.yaml"), []).settings.algorithm
    assert list(algorithm_code_problems(algorithm)) == []


def test_the_algorithm_section(tmp_path: Path) -> None:
    settings = paste("Algorithm", tmp_path)
    assert list(algorithm_code_problems(settings.algorithm)) == []
    subprocess.run([sys.executable, "check.py"], cwd=tmp_path, check=True, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})


def test_the_reward_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.split("\n## Reward\n")[1].split("\n## ")[0]
    function, grader = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_reward.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    try_out, run = (shlex.split(line) for line in commands.splitlines())
    assert main(try_out[3:]) == 0
    assert "ms: reward 1.1" in capsys.readouterr().out
    settings = load(run[2], run[3:]).settings
    assert list(user_code_problems(settings)) == [] and settings.reward.positive_above == 0.5
    (terms,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "own.yaml").write_text(f"defaults: [rstar2-tiny-cpu, _self_]\n{terms}")
    assert list(user_code_problems(load("own.yaml", []).settings)) == []
    exec(grader.replace("grade_answer(", "print(grade_answer(").replace(")  #", "))  #"), {})
    assert "correct" in capsys.readouterr().out


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_keys_of_every_page_are_those_of_a_configuration(page: str) -> None:
    """Also of blocks that need more than is here, such as an MCP server; an ablation has keys of its own."""
    for block in re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL):
        data = yaml.safe_load(block)
        if "arms" not in data:
            assert list(unknown_keys({key: value for key, value in data.items() if key != "defaults"})) == []
