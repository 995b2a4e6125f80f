"""Mistakes of the first hour: files that cannot be read, keys by another name, values out of bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rstar2_megatron.runs.main import main
from rstar2_megatron.settings.load import ConfigError, load

TINY = "rstar2-tiny-cpu"
DEFAULTS = "defaults: [rstar2-tiny-cpu, _self_]\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("own.yaml", DEFAULTS.encode("utf-16"), "is no UTF-8 text"),
        ("own.yaml", (DEFAULTS + "# é").encode("latin-1"), "save it as UTF-8"),
        ("own.yaml", b"defaults: [own, _self_]\n", "its defaults name each other"),
        ("own.yaml", b"defaults: rstar2-tiny-cpu\n", r"own.yaml: .*; defaults are a list of names of YAMLs, and _self_ once"),
        ("own.yaml", b"defaults: [nope, _self_]\n", "own.yaml: its defaults name nope, and no such YAML is beside it or in /"),
        ("own.yaml", (DEFAULTS + "runner:\n\tmax_steps: 3\n").encode(), r"own.yaml:3: found character .*; indent by blanks"),
        ("own.yaml", (DEFAULTS + "runner: [3]\n").encode(), "own.yaml has a list where keys and values belong$"),
        ("own.yaml", b"- runner\n", "own.yaml has a list where keys and values belong$"),
        ("own.yaml", b"{a: " * 3000 + b"1" + b"}" * 3000, "nested too deeply"),
        (
            "own.yaml",
            (DEFAULTS + "runner: {max_steps: '${runner.seed'}\n").encode(),
            r"^runner.max_steps cannot be .*\{runner.seed'; \$\{section.key\} is",
        ),
        (
            "own.yaml",
            (DEFAULTS + "runner.max_steps: 3\n").encode(),
            r"runner.max_steps is one name .* runner: \{max_steps: ...\}",
        ),
        ("own.yml", DEFAULTS.encode(), "Hydra reads .yaml files alone; rename it to own.yaml"),
    ],
)
def test_a_yaml_that_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "own.yaml").touch()
    with pytest.raises(ConfigError, match=said) as refused:
        load(str(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_tool_descriptions_that_are_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("- {a: [\n")
    with pytest.raises(ConfigError, match=r"agentloop\.tool_descriptions: \S"):
        load(TINY, [f"agentloop.tool_descriptions={tmp_path}/tools.yaml"])


def test_a_key_of_the_command_line_goes_before_the_yaml_by_either_name() -> None:
    settings = load(TINY, ["rollout.model_path=/x", "algorithm.ratio_clip_eps=0.1"]).settings
    assert settings.rollout.model.model_path == "/x"
    assert (settings.algorithm.clip_ratio_low, settings.algorithm.clip_ratio_high) == (0.1, 0.1)
    both = load(TINY, ["rollout.model_path=/x", "rollout.model.model_path=/y", "algorithm.clip_ratio_low=0.3"]).settings
    assert both.rollout.model.model_path == "/y" and both.algorithm.clip_ratio_low == 0.3


@pytest.mark.parametrize(
    "word",
    [
        "actor.optim.adam_beta1=1.5", "actor.optim.adam_beta2=-1", "actor.optim.adam_eps=0", "actor.optim.weight_decay=-1",
        "actor.optim.lr=inf", "algorithm.clip_ratio_high=inf", "reward.timeout_s=inf", "tools.codejudge.host_port=99999",
        "runner.experiment_name=''", "runner.experiment_name=..", "runner.experiment_name=a/b",
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        load(TINY, [word])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--new", "a", "--model", "m", "--data", "d", "--dry-run"], "--new writes a YAML and takes --model and --data alone"),
        (["--new", "a", "--model", "m", "--data", "d", "runner.max_steps=3"], "--new writes a YAML and takes"),
        ([TINY, "recipe=rstar2-tiny"], f"no other name (got {TINY})"),
        (["recipe=rstar2-tiny", "recipe=other"], "no other name (got recipe=other)"),
        ([TINY, "algorithm.sampling_params.top_k=0", "--dry-run"], "top_k=0 in training"),
        ([TINY, "runner.resume_dir=/nonexistent", "--dry-run"], "runner.resume_dir=/nonexistent is not a checkpoint"),
        ([TINY, "--dryrun"], "unknown option --dryrun; did you mean --dry-run?"),
        ([TINY, "--foo"], "unknown option --foo; known: --help, --dry-run, --check"),
        ([TINY, "rollout.model.model_path=/etc/passwd", "--dry-run"], "/etc/passwd is not a directory; give a Hugging Face"),
    ],
)
def test_words_that_would_be_passed_over_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["recipe=", "--ablate"])
def test_misspelt_keys_of_a_recipe_and_an_ablation(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("confg: x\nstages: [{name: a, taks: sft}]\nsedes: [1]\n")
    assert main([f"{option}{path}"] if option.endswith("=") else [option, str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}: config has no value; " in said and "unknown key confg; did you mean config?" in said
    near = {"recipe=": "stages.0.taks; did you mean task?", "--ablate": "sedes; did you mean seeds?"}[option]
    assert f"unknown key {near}" in said and "Field required" not in said


def test_help_is_shown_whatever_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--new", "--help"]) == main(["--ablate", "-h"]) == 0
    assert capsys.readouterr().out.startswith("bash run_rstar2.sh [NAME]")
