"""`--new`: a YAML for a user's directory that the plan accepts, from the user's own directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rstar2_megatron.runs.main import main
from rstar2_megatron.settings.load import CALLED_FROM, load
from rstar2_megatron.settings.planning import plan as planning
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
