"""`--new`: a YAML for a user's directory that the plan accepts, from the user's own directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.model_directory import write_directory
from rstar2_megatron.runs import preflight
from rstar2_megatron.runs.inputs import new_config
from rstar2_megatron.runs.main import main
from rstar2_megatron.settings import placement
from rstar2_megatron.settings.load import CALLED_FROM, load
from rstar2_megatron.settings.planning import plan as planning
from rstar2_megatron.settings.rlinf_keys import get
from tests.rollout.tiny import make_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "model")
    rows = [{"prompt": f"How much is {i} and 2?", "solutions": [str(i + 2)]} for i in range(5)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv(CALLED_FROM, str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")  # no GPU, whatever machine this is
    return tmp_path


ARGUMENTS = ["--new", "mine", "--model", "model", "--data", "mine.jsonl"]


def test_the_yaml_is_short_and_its_plan_fits(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    path = here / "mine.yaml"
    assert str(path) in capfd.readouterr().out and len(path.read_text().splitlines()) < 60
    settings = load(str(path), []).settings
    assert settings.rollout.model.model_path == str(here / "model")
    assert settings.data.rollout_batch_size == 5 and not settings.cold_start.enabled
    assert settings.data.max_prompt_length % 128 == 0
    assert main(["mine.yaml", "--dry-run"]) == 0
    assert "GB of all processes" in capfd.readouterr().out
    assert main(ARGUMENTS) == 2
    assert f"{path} is there already" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new", "mine", "--model", "model"], "--data has no value; the whole form: --new NAME"),
        (["--new", "mine", "--model", "nowhere", "--data", "mine.jsonl"], "nowhere/config.json does not exist: give"),
        (["--new", "mine", "--model", "model", "--data", "no.jsonl"], "no.jsonl does not exist"),
    ],
)
def test_bad_arguments(words: list[str], message: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capfd.readouterr().err and not (here / "mine.yaml").exists()


def test_a_model_larger_than_the_machine_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts every process: with 8 GB the remedy is a key, with 1 GB there is none."""
    assert main(ARGUMENTS) == 0
    settings = load(str(here / "mine.yaml"), ["runner.max_tokens_per_mbs=262144"]).settings
    problems = {}
    for gb in (8.0, 1.0):
        monkeypatch.setattr(planning, "visible_host_gb", lambda gb=gb: gb)
        (problems[gb],) = planning.make_plan(settings).problems
    assert "the machine has 8.0; set runner.max_tokens_per_mbs=" in problems[8.0]
    assert "the machine has 1.0; take a smaller model or a machine with more memory" in problems[1.0]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("size", "gpus", "gb", "host_gb", "written"),
    [
        ("0.5B", 1, 24, 64, {"actor.model.recompute_granularity": "full", "rollout.gpu_memory_utilization": 0.65}),
        ("1.5B", 1, 80, 128, {}),
        ("3B", 1, 80, 128, {"actor.model.recompute_granularity": "full"}),
        ("7B", 1, 80, 256, {"actor.optim.optimizer_cpu_offload": True}),
        ("7B", 2, 80, 256, {"actor.optim.optimizer_cpu_offload": True}),
        ("7B", 4, 80, 512, {"actor.model.tensor_model_parallel_size": 4}),
        ("7B", 8, 80, 1900, {"actor.model.recompute_granularity": "full"}),
    ],
)
def test_a_layout_for_the_gpus_of_the_machine(
    size: str,
    gpus: int,
    gb: int,
    host_gb: int,
    written: dict[str, Any],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """nvidia-smi is a script that says what one of such a machine says."""
    directory = here / f"Qwen2.5-{size}"
    write_directory(directory, directory.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(here / "model" / name, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"word{i}": i for i in range(1000, 120_000)}  # most of an embedding, as a model's own
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    program = here / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n" + f"echo {gb * 10**9 // 2**20 + 1}\n" * gpus)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    for module in (new_config, planning, preflight):
        monkeypatch.setattr(module, "visible_host_gb", lambda: float(host_gb))
    placement.visible_gpus.cache_clear()
    try:
        assert main(["--new", "mine", "--model", directory.name, "--data", "mine.jsonl"]) == 0
        data = yaml.safe_load((here / "mine.yaml").read_text())
        assert main(["mine.yaml", "--dry-run"]) == 0
    finally:
        placement.visible_gpus.cache_clear()
    plan = capfd.readouterr().out
    assert f"{gpus} GPUs of {gb} GB on 1 node" in plan and plan.endswith("fits\n")
    assert {key: get(data, key) for key in written} == written


def test_columns_of_other_names_are_written(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"How much is {i} and 2?", "answer": f"Add {'the two numbers ' * 9}: {i + 2}"} for i in range(5)]
    (here / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(ARGUMENTS) == 0
    assert "5 of 5 problems have worked solutions or none, which no answer equals" in capfd.readouterr().err
    data = load(str(here / "mine.yaml"), []).settings.data
    assert (data.prompt_key, data.answer_key) == ("question", "answer")
    assert main(["mine.yaml", "--dry-run"]) != 0
    assert "data.train_data_paths: 5 of 5 problems have worked solutions" in capfd.readouterr().err
