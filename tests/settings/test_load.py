"""YAML and overrides to settings, and the message of every mistake."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.settings.load import (
    CONFIG_DIR,
    ConfigError,
    config_names,
    load,
    load_settings,
    nearest_keys,
    print_config,
    to_dict_config,
    valid_keys,
)
from rstar2_megatron.settings.rlinf_keys import WITHOUT_MEANING
from rstar2_megatron.settings.schema import Settings
from tests.settings.loaded import loaded, written
from tests.settings.rlinf_yaml import RLINF_7B

TINY = "rstar2-tiny-cpu"


@pytest.mark.parametrize("name", config_names())
def test_every_shipped_yaml_loads_without_notes(name: str) -> None:
    """But for what `precision: auto` stands for on this machine."""
    assert [note for note in loaded(name).notes if not note.startswith("actor.model.precision")] == []


@pytest.mark.parametrize("name", [n for n in config_names() if not n.endswith("-cpu")])
def test_a_size_is_the_base_plus_a_few_lines(name: str) -> None:
    lines = (CONFIG_DIR / f"{name}.yaml").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 16


def test_released_batch_and_algorithm_in_the_base() -> None:
    s = load("rstar2-qwen2.5-14b-megatron").settings
    sampling = s.algorithm.down_sampling.down_sampling_config
    assert (s.data.rollout_batch_size, s.algorithm.group_size, sampling.down_sample_to_n) == (128, 32, 16)
    assert (s.algorithm.clip_ratio_low, s.algorithm.clip_ratio_high, s.algorithm.clip_ratio_c) == (0.2, 0.28, 3)
    assert (s.actor.optim.lr, s.actor.lr_sched.lr_warmup_iters) == (1e-6, 20)
    assert (s.data.max_prompt_length, s.algorithm.sampling_params.max_new_tokens) == (2048, 8192)
    assert s.runner.seq_length == 10240


def test_overrides_reach_the_settings_written_in_the_yaml_or_not() -> None:
    overrides = ["runner.max_steps=3", "+runner.keep_checkpoints=5", "rollout.sglang.server_args={tp_size: 1}"]
    settings = load_settings(TINY, [*overrides, "data.train_data_paths=[a.jsonl, b.jsonl]"])
    assert settings.runner.max_steps == 3
    assert settings.runner.keep_checkpoints == 5
    assert settings.rollout.sglang.server_args == {"tp_size": 1}
    assert settings.data.train_data_paths == ["a.jsonl", "b.jsonl"]


def test_a_new_placement_replaces_the_old_one() -> None:
    settings = load(TINY, ["cluster.component_placement={'actor,rollout,reward': all}"]).settings
    assert settings.cluster.component_placement == {"actor,rollout,reward": "all"}


def test_removing_a_key_takes_its_default() -> None:
    settings = load(TINY, ["~algorithm.clip_ratio_high"]).settings
    assert settings.algorithm.clip_ratio_high == 0.28


def test_the_dict_config_holds_every_default_and_no_empty_node_groups() -> None:
    config = to_dict_config(load("rstar2-qwen2.5-7b-megatron").settings)
    assert "node_groups" not in config.cluster
    assert config.actor.model.context_parallel_size == 1
    assert config.rollout.pipeline_parallel_size == 1


@pytest.mark.parametrize("name", config_names())
def test_printed_configuration_reads_back_equal(name: str, tmp_path: Path) -> None:
    settings = loaded(name).settings
    path = tmp_path / "printed.yaml"
    path.write_text(print_config(settings))
    assert load(str(path)).settings == settings


def test_a_yaml_elsewhere_may_build_on_the_base(tmp_path: Path) -> None:
    data = {"defaults": ["rstar2-qwen2.5-7b-megatron", "_self_"], "runner": {"experiment_name": "mine"}}
    settings = load(written(tmp_path / "mine.yaml", data)).settings
    assert settings.runner.experiment_name == "mine" and settings.algorithm.group_size == 32


# -------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ("rstar2-tiny", [], r"no configuration 'rstar2-tiny' in .*nearest: rstar2-tiny-cpu"),
        ("xyz", [], r"no configuration 'xyz'.*rstar2-tiny-cpu"),
        ("nowhere/run.yaml", [], r"no configuration file nowhere/run.yaml"),
        (TINY, ["algorithm.groupsize=3"], r"unknown key algorithm.groupsize; .* is algorithm.group_size"),
        (
            TINY,
            ["+actor.tensor_model_parallel_size=2"],
            r"unknown key actor.tensor_model_parallel_size; .* is actor.model.tensor_model_parallel_size",
        ),
        (TINY, ["runer.max_steps=3"], r"unknown key runer; .* is runner"),
        (TINY, ["max_steps=3"], r"unknown key max_steps; .* is runner.max_steps"),
        (TINY, ["data.val_data_paths=a.jsonl"], r"valid list; write data.val_data_paths=\[a.jsonl\]"),
        (TINY, ["data.val_data_paths=null"], r"valid list; write data.val_data_paths=\[\]"),
        (TINY, ["qqqqq=3"], r"unknown key qqqqq; the sections are cluster, runner"),
        (TINY, ["algorithm.group_size=abc"], r"algorithm.group_size='abc': input should be a valid integer"),
        (TINY, ["algorithm.group_size=0"], r"algorithm.group_size=0: input should be greater than or equal to 1"),
        (TINY, ["actor.model.precision=fp16"], r"actor.model.precision='fp16': .*'fp32' or 'bf16'"),
        (TINY, ["algorithm.kl_beta=-0.1"], r"algorithm.kl_beta=-0.1"),
        (TINY, ["runner.max_steps"], r"runner.max_steps"),
        (TINY, ["runner.max_steps=[1"], r"runner.max_steps=\[1 cannot be read; an override is written key=value"),
        (TINY, ["data.val_data_paths=[a (1).jsonl]"], r"in quotes: \"key=\['a \(1\).jsonl'\]\""),
        (TINY, ["data=[1]"], r"^rstar2-tiny-cpu.yaml: Error merging override data=\[1\]$"),
        (TINY, ["runner.max_steps=1,2"], r"^'runner.max_steps=1,2' cannot be read; .*, a list key=\[a,b\], .* commas"),
        (TINY, ["~runner.nothing"], r"^'runner.nothing' does not exist; ~key removes a key that rstar2-tiny-cpu.yaml or"),
        (TINY, ["~runner.max_steps=99"], r"^The value of 'runner.max_steps' is 50 and not 99; ~key removes"),
        (TINY, ["hydra.run.dir=/x"], r"^hydra.run.dir=/x: Hydra.s own keys do nothing here; leave it out .runner.output_dir"),
        (TINY, ["=3"], r"'=3' cannot be read; an override is written key=value"),
        (TINY, ["cluster.component_placement=[a"], r"^cluster.component_placement: expected .*; indent by blanks, close each"),
        (TINY, ["runner.max_steps=${foo:1}"], r"^runner.max_steps cannot be computed: Unsupported .* foo; ..section.key. is"),
        (TINY, ["rollout.model.model_path=???"], r"rollout.model.model_path has no value; .*model_path=\.\.\."),
        (TINY, ["runner.output_dir=${nowhere.x}"], r"^runner.output_dir cannot be .*'nowhere.x' not found; ..section"),
        ("base", [], r"has no value; set it"),
    ],
)
def test_mistakes_name_key_value_and_remedy(config: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(config, overrides)


def test_the_home_directory_in_an_override(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shells leave it: a key with a dot is no assignment to them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [
        "rollout.model.model_path=~/m",
        "data.val_data_paths=[~/a.jsonl,'~/b c.jsonl']",
        "agentloop.system_prompt='about ~/x'",
    ]
    settings = load(TINY, words).settings
    assert settings.rollout.model.model_path == f"{tmp_path}/m"
    assert settings.data.val_data_paths == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b c.jsonl"]
    assert settings.agentloop.system_prompt == "about ~/x"


def test_rlinfs_switch_of_the_entropy_alone_asks_for_no_bonus(tmp_path: Path) -> None:
    data = copy.deepcopy(RLINF_7B)
    data["algorithm"] |= {"calculate_entropy": False}
    data["algorithm"].pop("entropy_bonus", None)
    assert load(written(tmp_path / "a.yaml", data)).settings.algorithm.entropy_bonus == 0


@pytest.mark.parametrize("word", ["actor_rollout_ref.rollout.n=8", "trainer.nnodes=2", "data.max_response_length=4096"])
def test_a_key_of_verl_leads_to_the_table(word: str) -> None:
    with pytest.raises(ConfigError, match=r"which is verl's; docs/parity.md lists verl's keys with those of this project"):
        load("rstar2-tiny-cpu", [word])


def test_unknown_keys_in_lists_of_sections_are_found() -> None:
    phases = "cold_start.phases=[{name: a, data_path: b, steps: 1, batch_size: 1, lr: 1, epochs: 2}]"
    with pytest.raises(ConfigError, match=r"unknown key cold_start.phases.0.epochs"):
        load(TINY, [phases])


def test_broken_yaml_is_an_error_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1\nb: }")
    with pytest.raises(ConfigError, match="broken"):
        load(str(path))


@given(st.sampled_from(sorted(valid_keys())))
def test_every_key_is_its_own_nearest(key: str) -> None:
    assert nearest_keys(key)[0] == key


# ----------------------------------------------------------------------------------------------- RLinf


def test_an_rlinf_yaml_loads_with_its_meaning(tmp_path: Path) -> None:
    loaded = load(written(tmp_path / "rlinf.yaml", RLINF_7B))
    s = loaded.settings
    assert s.runner.max_steps == 1_000_000  # -1: until the epochs are over
    assert s.tools.codejudge.max_concurrency == 64
    assert s.actor.lr_sched.lr_warmup_iters == 20  # 0.1 of 200
    assert s.actor.distributed_timeout_minutes == 60
    assert s.algorithm.sampling_params.max_new_tokens == 8192
    assert s.actor.model.recompute_num_layers == 20
    assert s.data.type == "math"
    listed = next(note for note in loaded.notes if note.startswith("RLinf keys without meaning here"))
    for key in ("critic", "actor.megatron", "inference", "data.num_workers"):
        assert f"{key} (" in listed or f"{key}." in listed


def test_rlinf_clip_eps_fills_what_is_null(tmp_path: Path) -> None:
    data = copy.deepcopy(RLINF_7B)
    data["algorithm"] |= {"ratio_clip_eps": 0.15, "clip_ratio_low": None, "clip_ratio_c": None}
    del data["algorithm"]["clip_ratio_high"]
    s = load(written(tmp_path / "a.yaml", data)).settings
    assert (s.algorithm.clip_ratio_low, s.algorithm.clip_ratio_high) == (0.15, 0.15)
    assert s.algorithm.clip_ratio_c is None


@pytest.mark.parametrize(("updates", "decay", "warmup"), [(1, None, 20), (4, None, 80), (4, 100, 10)])
def test_an_rlinf_warm_up_fraction_is_of_all_optimizer_steps(
    tmp_path: Path, updates: int, decay: int | None, warmup: int
) -> None:
    data = copy.deepcopy(RLINF_7B)
    data["runner"]["max_steps"] = 200
    data["algorithm"]["n_minibatches"] = updates
    data["actor"]["lr_sched"] |= {
        "lr_warmup_fraction": 0.1, "lr_warmup_iters": 0, "lr_decay_iters": decay
    }  # fmt: skip
    assert load(written(tmp_path / "a.yaml", data)).settings.actor.lr_sched.lr_warmup_iters == warmup


def test_rlinf_schedule_rates_win_as_they_do_there(tmp_path: Path) -> None:
    data = copy.deepcopy(RLINF_7B)
    data["actor"]["lr_sched"] |= {"max_lr": 5e-6, "lr_warmup_iters": 7}
    loaded = load(written(tmp_path / "a.yaml", data))
    assert loaded.settings.actor.optim.lr == 5e-6
    assert loaded.settings.actor.lr_sched.lr_warmup_iters == 7
    assert any("actor.lr_sched.max_lr=5e-06 read as actor.optim.lr" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("algorithm", "loss_type", "actor_critic", "algorithm.loss_type='actor_critic' is not implemented"),
        ("algorithm", "normalize_advantages", True, "algorithm.normalize_advantages=True is not implemented"),
        ("runner", "enable_dynamic_batch_size", False, "runner.enable_dynamic_batch_size=False is not implemented"),
        ("critic", "use_critic_model", True, "critic.use_critic_model=True is not implemented"),
        ("algorithm", "adv_type", "gae", "algorithm.adv_type='gae'"),
        ("runner", "only_eval", True, "runner.only_eval=True is not .* the only value is False: runner.max_steps=0 evaluates"),
        ("runner", "ckpt_path", "/a", "runner.ckpt_path='/a' is not .* a run goes on by runner.resume_dir"),
        ("actor", "model", RLINF_7B["actor"]["model"] | {"is_lora": True}, "actor.model.is_lora=True is not"),
        ("data", "apply_chat_template_kwargs", {"enable_thinking": False}, "a template that needs none"),
        ("algorithm", "entropy_bonus", 0.1, "algorithm.entropy_bonus=0.1 with algorithm.calculate_entropy=False"),
    ],
)
def test_what_rlinf_can_and_we_cannot_is_refused(tmp_path, section, key, value, message) -> None:
    data = copy.deepcopy(RLINF_7B)
    data[section][key] = value
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path / "a.yaml", data))


def test_no_listed_rlinf_key_shadows_a_key_of_ours() -> None:
    ours = set(valid_keys(Settings))
    assert not [key for key, _ in WITHOUT_MEANING if key in ours]
