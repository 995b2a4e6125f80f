"""`algorithm.variant`: what it sets, what overrides it, where each value comes from; RLinf's own YAML as released."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from rstar2_megatron.runs.main import main, parse
from rstar2_megatron.runs.stages import load_recipe
from rstar2_megatron.settings.load import CALLED_FROM, ConfigError, find_config, load, print_config
from rstar2_megatron.settings.variant import VARIANTS, algorithm_rows
from tests.settings.loaded import written
from tests.settings.rlinf_yaml import RLINF_7B

SIZE = "rstar2-qwen2.5-7b-megatron"
TEMPLATE = (
    "{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.required | join(', ') }}){% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<reason>{% endif %}"
)


def value(settings, path: str):
    data = settings.model_dump(mode="json")
    for name in path.split("."):
        data = data[name]
    return data


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("config", [SIZE, SIZE + "-paper"])
def test_one_switch_sets_all_of_it(config: str, variant: str) -> None:
    settings = load(config, [f"algorithm.variant={variant}"]).settings
    assert {path: value(settings, path) for path in VARIANTS[variant]} == VARIANTS[variant]


def test_without_the_switch_nothing_changes() -> None:
    settings = load(SIZE).settings
    assert settings.algorithm.variant is None
    assert settings.algorithm.down_sampling.down_sampling_config.mode == "released"
    assert (settings.reward.mode, settings.algorithm.loss_agg_func) == ("paper", "token-mean")


def test_the_command_line_and_the_named_yaml_override_the_switch(tmp_path: Path) -> None:
    data = {"defaults": [SIZE, "_self_"], "algorithm": {"variant": "released", "clip_ratio_c": 4.0}}
    loaded = load(written(tmp_path / "mine.yaml", data), ["reward.mode=paper"])
    settings = loaded.settings
    assert settings.algorithm.clip_ratio_c == 4.0 and settings.reward.mode == "paper"
    assert settings.algorithm.loss_agg_func == "released-verl"
    rows = dict(algorithm_rows(settings, loaded.origins))
    assert rows["algorithm.variant"] == "released  (mine.yaml)"
    assert rows["algorithm.clip_ratio_c"] == "4.0  (mine.yaml; released is 3.0)"
    assert rows["reward.mode"] == "paper  (command line; released is released)"
    assert rows["algorithm.loss_agg_func"] == "released-verl  (algorithm.variant=released)"
    assert "own wording" in rows["agentloop.chat_template"]


def test_the_saved_configuration_keeps_the_values(tmp_path: Path) -> None:
    settings = load(SIZE, ["algorithm.variant=released", "reward.mode=paper"]).settings
    path = tmp_path / "config.yaml"
    path.write_text(print_config(settings))
    assert load(str(path)).settings == settings


def test_an_unknown_variant_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.variant='relased'; it is paper, released, released-rlinf"):
        load(SIZE, ["algorithm.variant=relased"])


def test_the_dry_run_names_every_value_and_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rstar2-qwen2.5-7b-megatron-paper", "algorithm.clip_ratio_c=2.0", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    for path in VARIANTS["released"]:
        assert path in plan
    for line in ("(config/paper.yaml)", "2.0  (command line)", "(config/base.yaml)", "algorithm.kl_clamp"):
        assert line in plan


# ----------------------------------------------------------------------------------------------- RLinf


def rlinf(**changes: object) -> dict:
    data = copy.deepcopy(RLINF_7B)
    data["rollout"]["custom_chat_template"] = TEMPLATE
    for path, new in changes.items():
        section, _, key = path.partition("__")
        data.setdefault(section, {})[key] = new
    return data


def test_rlinfs_rstar2_yaml_runs_as_released_with_its_chat_template(tmp_path: Path) -> None:
    loaded = load(written(tmp_path / "rstar2.yaml", rlinf()))
    settings = loaded.settings
    assert settings.algorithm.variant == "released-rlinf"
    expected = VARIANTS["released-rlinf"]
    assert {path: value(settings, path) for path in expected} == expected
    assert settings.agentloop.chat_template == TEMPLATE
    rows = dict(algorithm_rows(settings, loaded.origins))
    assert rows["reward.mode"] == "released  (algorithm.variant=released-rlinf)"
    assert rows["agentloop.max_assistant_turns"] == "5  (rstar2.yaml)"


def test_rlinfs_global_token_scale_is_our_token_mean(tmp_path: Path) -> None:
    path = written(tmp_path / "a.yaml", rlinf(algorithm__use_valid_token_scale=True))
    assert load(path).settings.algorithm.loss_agg_func == "token-mean"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"reward__reward_type": "math", "actor__training_backend": "fsdp", "algorithm__adv_type": "gae"},
            "reward.reward_type='math': RLinf's reasoning tasks train one answer without a tool",
        ),
        ({"actor__training_backend": "fsdp"}, "actor.training_backend='fsdp': the actor here is Megatron-core"),
        ({"rollout__rollout_backend": "vllm"}, "rollout.rollout_backend='vllm': the engine here is SGLang"),
    ],
)
def test_rlinfs_other_yamls_are_refused_with_the_one_reason(tmp_path: Path, changes: dict, reason: str) -> None:
    data = rlinf(**changes)
    if "reward__reward_type" in changes:  # a reasoning YAML has none of these
        del data["agentloop"], data["tools"], data["algorithm"]["down_sampling"]
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path / "a.yaml", data))
    assert str(error.value).startswith(reason) and ";" not in str(error.value)


# ------------------------------------------------------------------------------- wording and paths


def test_wording_is_read_from_files_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "function", "function": {"name": "python_code_with_standard_io", "parameters": {}}}
    (tmp_path / "tools.json").write_text(json.dumps([schema]))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    monkeypatch.setenv(CALLED_FROM, str(tmp_path))
    words = ["agentloop.chat_template=chat.jinja", "agentloop.tool_descriptions=tools.json"]
    agentloop = load(SIZE, words).settings.agentloop
    assert agentloop.chat_template == TEMPLATE and agentloop.tool_descriptions == [schema]
    with pytest.raises(ConfigError, match=r"none\.jinja"):
        load(SIZE, ["agentloop.chat_template=none.jinja"])
    with pytest.raises(ConfigError, match="system_prompt are written too; set them to null"):
        load(SIZE, [words[0], "agentloop.system_prompt=x"])


def test_a_relative_yaml_is_the_one_beside_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell script changes to the project; the user's `config/x.yaml` must not become the project's."""
    (tmp_path / "config").mkdir()
    mine = tmp_path / "config" / f"{SIZE}.yaml"
    mine.touch()
    monkeypatch.setenv(CALLED_FROM, str(tmp_path))
    assert find_config(f"config/{SIZE}.yaml") == (mine.parent, SIZE)
    with pytest.raises(ConfigError, match="no configuration file"):
        find_config("config/rstar2-tiny-cpu.yaml")
    assert find_config("rstar2-tiny-cpu")[1] == "rstar2-tiny-cpu"
    (tmp_path / "config" / "mine.yaml").write_text("stages: 3")
    with pytest.raises(ConfigError, match=f"{tmp_path}/config/mine.yaml"):
        load_recipe("config/mine.yaml")
    assert load_recipe("rstar2-tiny").name


def test_models_and_data_are_those_beside_the_yaml_or_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the project has files of such names; what is nowhere, and what is no file, stays as it is written."""
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "mine.yaml").write_text("defaults: [rstar2-tiny-cpu, _self_]")
    for folder in ("yaml", "user/docs", "user/model"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for file in ("yaml/a.jsonl", "user/a.jsonl", "user/docs/judge.md"):
        (tmp_path / file).touch()
    monkeypatch.setenv(CALLED_FROM, str(tmp_path / "user"))
    words = ["rollout.model.model_path=model", "data.train_data_paths=[a.jsonl,docs/judge.md,nowhere.jsonl,'hf:a/b']"]
    words.append("cold_start.phases=[{name: a, data_path: a.jsonl, steps: 1, batch_size: 1, lr: 0.1}]")
    words += ["data.val_data_paths=[]", "runner.corridor=docs/judge.md"]
    settings = load(str(tmp_path / "yaml" / "mine.yaml"), words).settings
    assert settings.rollout.model.model_path == f"{tmp_path}/user/model" and settings.data.val_data_paths == []
    beside = [f"{tmp_path}/yaml/a.jsonl", f"{tmp_path}/user/docs/judge.md", "nowhere.jsonl", "hf:a/b"]
    assert settings.data.train_data_paths == beside and settings.runner.corridor == beside[1]
    assert [phase.data_path for phase in settings.cold_start.phases] == beside[:1]
    assert settings.runner.output_dir == f"{tmp_path}/user/results"
    assert settings.runner.logger.log_path == f"{tmp_path}/user/results/{settings.runner.experiment_name}"
    assert load(SIZE, [f"runner.output_dir={tmp_path}/out"]).settings.runner.output_dir == f"{tmp_path}/out"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(SIZE, ["rollout.model.model_path='~/user/model'"]).settings.rollout.model.model_path == f"{tmp_path}/user/model"
    monkeypatch.setenv(CALLED_FROM, str(Path.cwd()))
    settings = load(SIZE, ["rollout.model.model_path=docs"]).settings
    assert (settings.rollout.model.model_path, settings.runner.output_dir) == ("docs", "results")


def test_hydras_options_name_the_yaml() -> None:
    for words in (["--config-path", "/a", "--config-name", "b"], ["--config-name=b", "--config-path=/a"]):
        assert parse([*words, "runner.max_steps=1"]).config == "/a/b"
    assert parse(["--config-name", "b"]).config == "b"
    with pytest.raises(ConfigError, match="needs --config-name"):
        parse(["--config-path", "/a"])
