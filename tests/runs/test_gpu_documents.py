"""docs/8xh100.md and docs/multi_node.md against the program: paths, keys, overrides, commands and planned figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rstar2_megatron.judge.__main__ import command_line
from rstar2_megatron.runs.main import main
from rstar2_megatron.settings.load import config_names, load, valid_keys
from tests.e2e.runs import ROOT

DOCUMENTS = ("8xh100.md", "multi_node.md")
SECTIONS = "actor|rollout|runner|data|algorithm|tools|agentloop|evaluation|cluster|reward|cold_start"


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_is_there(name: str) -> None:
    words = text(name)
    assert_names_are_there(words)
    configs = {one.removesuffix(".yaml") for one in re.findall(r"\brstar2-(?:qwen|tiny)[\w.-]*\w", words)}
    assert configs and configs <= set(config_names())
    keys = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)`", words))
    assert keys and keys - set(valid_keys()) - {"actor.offload_"} == set()


def assert_names_are_there(words: str) -> None:
    paths = re.findall(r"\b((?:docs|scripts|config|tests|docker|benchmarks|requirements|data_process)/[\w./-]*\w)", words)
    assert paths and [p for p in set(paths) if not (ROOT / p).exists()] == []
    modules = re.findall(r"-m ((?:rstar2_megatron|benchmarks)[\w.]*)", words)
    files = [ROOT.joinpath(*module.split(".")) for module in modules]
    assert not [f for f in files if not f.with_suffix(".py").exists() and not (f / "__main__.py").exists()]


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md", "docs/your_model.md", "tests/without_a_gpu.md"])
def test_files_and_tests_that_a_page_names_are_there(page: str) -> None:
    words = (ROOT / page).read_text()
    assert_names_are_there(words)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", words) if f"def {name}(" not in tests] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_override_is_accepted(name: str) -> None:
    found = re.findall(rf"(?<![\w.])((?:{SECTIONS})\.[\w.]+=(?:\{{.*?\}}|\[[^\]]*\]|[^\s`,;)]+))", text(name))
    overrides = {one for one in found if not one.endswith(("=N", "HOST", "JUDGE"))}
    assert len(overrides) >= 3
    for one in sorted(overrides):
        load("rstar2-qwen2.5-7b-megatron", [one])


def plan(capsys: pytest.CaptureFixture[str], name: str) -> str:
    assert main([name, "--dry-run"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_plans_of_the_document_are_the_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # the plan for 80 GB GPUs, whatever machine this is
    words = text("8xh100.md")
    (shown,) = re.findall(r"```\n(training +GB per rank.*?)```", words, re.DOTALL)
    seven = plan(capsys, "rstar2-qwen2.5-7b-megatron")
    for row in re.sub(r"\n {10,}(?=\+)", " ", shown).splitlines():
        for piece in re.split(r" {2,}|, \.\.\.\)", row.strip()):
            assert piece in seven, piece
    rows = re.findall(r"^\| (.*?) \| ([\d.]+) \| (\d x TP \d) \| (GPU|host).*? \| `(.*?)`(.*) \|$", words, re.MULTILINE)
    assert len(rows) == 11
    for label, rank_gb, engines, place, name, rest in rows:
        figures = plan(capsys, name)
        assert f"GB per rank {rank_gb} = " in figures and f"engines {engines} " in figures, label
        assert ("updated there" in figures) is (place == "host"), label
        host = re.search(r"a host of (\d+) GB", rest)
        assert host is None or f" of {host[1]} = optimizer" in figures, label
    host = re.search(
        r"GB per node \d+ of 1900 = optimizer (\d+) \(pinned\) \+ weights (\d+) \+ a checkpoint written or loaded (\d+)",
        plan(capsys, "rstar2-qwen2.5-14b-megatron"),
    )
    assert host
    optimizer, weights, checkpoint = map(int, host.groups())
    flat = " ".join(words.split())
    assert f"pins {optimizer + weights} GB" in flat and f"takes another {checkpoint} GB" in flat


def test_commands_take_the_options_that_the_documents_give_them() -> None:
    both = "\n".join(map(text, DOCUMENTS)).replace("\\\n", " ")
    for line in re.findall(r"-m rstar2_megatron\.judge (.*)", both):
        command_line().parse_args(re.sub(r" +[#&].*", "", line).split())
    scripts = re.findall(r"(data_process/\w+\.py) (.*)", both)
    assert len(scripts) == 2
    for script, words in scripts:
        done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr[-500:]
        for option in re.findall(r"(?<!\S)--[\w-]+", words):
            assert option in done.stdout, (script, option)
    ray = subprocess.run(
        [str(Path(sys.executable).with_name("ray")), "start", "--help"], capture_output=True, text=True, timeout=120
    )
    for option in re.findall(r"--[\w-]+", " ".join(re.findall(r"ray start (.*)", both))):
        assert option in ray.stdout, option
