"""Recipes as data: what a stage runs with, what it passes on, and which mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rstar2_megatron.report.table import render_table
from rstar2_megatron.runs.main import main
from rstar2_megatron.runs.recipe_run import write_curve
from rstar2_megatron.runs.stages import Recipe, StagePlan, load_recipe, override_words
from rstar2_megatron.settings.load import ConfigError, load

STAGES = [
    {"name": "sft", "task": "sft", "overrides": {"sft.lr": 1e-4}},
    {"name": "rl-a", "overrides": {"runner.max_steps": 3}},
    {"name": "rl-b", "optimizer": "keep", "overrides": {"runner.max_steps": 4}},
    {"name": "filter", "task": "difficulty_filter"},
    {"name": "rl-c", "problems_from": "filter"},
]


def recipe(**changes: Any) -> Recipe:
    whole = {"name": "r", "config": "rstar2-qwen2.5-7b-megatron", "stages": STAGES, **changes}
    return Recipe.model_validate(whole)


def plan(tmp_path: Path, *words: str, **changes: Any) -> StagePlan:
    return StagePlan(recipe(**changes), [f"runner.output_dir={tmp_path}", *words])


def test_paper_stages_are_shipped() -> None:
    """SFT, 300 steps of 8K, 85 of 12K, filter, 125 of 12K with 15 turns and a fresh optimizer."""
    r = load_recipe("rstar2-agent-14b")
    assert [(s.name, s.task) for s in r.stages] == [
        ("sft", "sft"),
        ("rl-8k", "reasoning"),
        ("rl-12k", "reasoning"),
        ("filter", "difficulty_filter"),
        ("rl-12k-hard", "reasoning"),
    ]
    stages = StagePlan(r)
    rl = [stages.settings(s, for_plan=True) for s in r.stages if s.task == "reasoning"]
    assert [s.runner.max_steps for s in rl] == [300, 85, 125]
    assert [s.algorithm.sampling_params.max_new_tokens for s in rl] == [8192, 12288, 12288]
    assert [s.agentloop.max_assistant_turns for s in rl] == [10, 10, 15]
    assert [s.runner.seq_length for s in rl] == [10240, 14336, 14336]
    assert all(s.data.rollout_batch_size == 512 and s.actor.optim.lr == 1e-6 for s in rl)
    assert (r.stages[2].optimizer, r.stages[4].optimizer, r.stages[4].problems_from) == ("keep", "reset", "filter")
    sft = stages.settings(r.stages[0], for_plan=True).sft
    assert (sft.epochs, sft.lr, sft.warmup_ratio, sft.batch_size) == (3, 5e-6, 0.04, 128)
    (condition,) = rl[0].runner.stop_when
    assert (condition.metric, condition.at_least) == ("rollout/clip_ratio", 0.1)


def test_model_optimizer_and_problems_are_passed_on(tmp_path: Path) -> None:
    stages = plan(tmp_path)
    checkpoint = tmp_path / "r" / "rl-a" / "checkpoints" / "global_step_3"
    checkpoint.mkdir(parents=True)
    settings = {s.name: stages.settings(s) for s in stages.recipe.stages}
    models = {name: s.rollout.model.model_path.removeprefix(str(tmp_path)) for name, s in settings.items()}
    assert models == {
        "sft": "/path/to/model/Qwen2.5-7B-Instruct",
        "rl-a": "/r/sft/model",
        "rl-b": "/r/rl-a/model",
        "filter": "/r/rl-b/model",
        "rl-c": "/r/rl-b/model",
    }
    assert settings["rl-a"].runner.init_checkpoint is None
    assert settings["rl-b"].runner.init_checkpoint == str(checkpoint)
    assert settings["rl-c"].data.train_data_paths == [str(tmp_path / "r" / "filter" / "train.jsonl")]
    assert [s.runner.task_type for s in settings.values()] == [s.task for s in stages.recipe.stages]
    assert Path(settings["rl-a"].runner.logger.log_path) == tmp_path / "r" / "rl-a"


ROUNDS = [
    {"name": "base", "task": "sft"},
    {"name": "search-1", "task": "search"},
    {"name": "sft-1", "task": "sft", "model_from": "base", "trees_from": ["search-1"]},
    {"name": "ppm-1", "task": "preference", "trees_from": ["search-1"]},
    {"name": "search-2", "task": "search", "reward_model_from": "ppm-1"},
    {"name": "sft-2", "task": "sft", "model_from": "base", "trees_from": ["search-1", "search-2"]},
]


def test_trees_and_reward_models_are_passed_on(tmp_path: Path) -> None:
    """A preference stage exports no policy: the stage after it starts from the SFT stage before it."""
    stages = plan(tmp_path, stages=ROUNDS)
    settings = {s.name: stages.settings(s) for s in stages.recipe.stages}
    root = tmp_path / "r"
    models = {name: s.rollout.model.model_path for name, s in settings.items()}
    assert [models[name] for name in ("search-1", "sft-1", "ppm-1", "search-2", "sft-2")] == [
        str(root / name / "model") for name in ("base", "base", "sft-1", "sft-1", "base")
    ]
    assert settings["ppm-1"].preference.train_data_paths == [str(root / "search-1/mcts.jsonl")]
    assert settings["sft-2"].sft.train_data_paths == [str(root / name / "mcts.sft.jsonl") for name in ("search-1", "search-2")]
    assert settings["search-1"].search.reward_model is None
    assert settings["search-2"].search.reward_model == str(root / "ppm-1/model")


def test_the_rounds_of_rstar_math_are_shipped() -> None:
    r = load_recipe("rstar-math-tiny")
    assert [s.task for s in r.stages] == ["sft", "sft", *["search", "sft", "preference"] * 2]
    stages = StagePlan(r)
    guides = [stages.settings(s, for_plan=True).search.guide for s in r.stages if s.task == "search"]
    assert guides == ["answers", "answers+scores"]


def test_the_four_rounds_of_the_paper_are_shipped() -> None:
    """Every policy begins at the configured model; round 3 is the first that a preference model guides."""
    r = load_recipe("rstar-math-7b")
    stages = StagePlan(r)
    settings = {s.name: stages.settings(s, for_plan=True) for s in r.stages}
    searches = [settings[f"search-{n}"].search for n in (1, 2, 3, 4)]
    assert [s.rollouts for s in searches] == [8, 16, 16, 16]
    assert [s.more_rollouts for s in searches] == [0, 16, 16, 112]
    assert [s.candidates for s in searches] == [5, 8, 8, 16]
    assert [s.guide for s in searches] == ["answers", "answers", "answers+scores", "answers+scores"]
    assert settings["search-4-seed-1"].search == searches[3].model_copy(update={"seed": 1})
    begins = {s.name: r.model_before(s.name) for s in r.stages}
    assert all(begins[f"sft-{n}"] is None for n in (1, 2, 3, 4)), "the configured model"
    assert [begins[name] for name in ("search-1", "search-2", "ppm-2", "search-3", "search-4")] == [
        None, "sft-1", "sft-2", "sft-2", "sft-3",
    ]  # fmt: skip
    sft, preference = settings["sft-4"].sft, settings["ppm-4"].preference
    assert (sft.epochs, sft.lr, sft.batch_size, sft.lr_decay_style) == (2, 7e-6, 128, "linear")
    assert (preference.epochs, preference.lr, preference.batch_size) == (1, 7e-6, 512)


def test_overrides_of_all_stages_and_of_one(tmp_path: Path) -> None:
    stages = plan(
        tmp_path,
        "actor.optim.lr=1e-5",
        "rl-b/runner.max_steps=9",
        overrides={"algorithm.group_size": 4, "algorithm.down_sampling.down_sampling_config.down_sample_to_n": 4},
    )
    a, b = (stages.settings(s, for_plan=True) for s in stages.recipe.stages[1:3])
    assert (a.runner.max_steps, b.runner.max_steps) == (3, 9)
    assert a.actor.optim.lr == b.actor.optim.lr == 1e-5 and b.algorithm.group_size == 4
    paths = plan(tmp_path, "data.train_data_paths=[/data/x.jsonl]").settings(stages.recipe.stages[1], for_plan=True)
    assert paths.data.train_data_paths == ["/data/x.jsonl"]
    assert plan(tmp_path, "runner.experiment_name=other").root == tmp_path / "other"


def test_a_placement_survives_too() -> None:
    for placement in ({"actor,rollout,reward": "0"}, {"actor": "0-1", "rollout": "all", "reward": 0}):
        settings = load("rstar2-tiny-cpu", override_words({"cluster.component_placement": placement})).settings
        assert settings.cluster.component_placement == placement


def test_a_stage_that_cannot_keep_an_optimizer_says_so(tmp_path: Path) -> None:
    stages = plan(tmp_path)
    with pytest.raises(ConfigError, match=r"rl-b keeps the optimizer of stage rl-a, but .* has no checkpoint"):
        stages.settings(stages.recipe.stages[2])


def test_fingerprint_changes_with_what_runs(tmp_path: Path) -> None:
    two = STAGES[1:3]
    first, changed = plan(tmp_path, stages=two), plan(tmp_path, "rl-b/runner.max_steps=9", stages=two)
    prints = [[p.fingerprint(s) for s in p.recipe.stages] for p in (first, changed)]
    assert prints[0][0] == prints[1][0] and prints[0][1] != prints[1][1]


def test_a_recipe_goes_on_at_another_place(tmp_path: Path) -> None:
    """A job that is queued again has another first node, and its judge another port."""
    two = STAGES[1:3]
    here = plan(tmp_path, stages=two)
    words = ["tools.codejudge.host_addr=node7", "tools.codejudge.host_port=21000", "runner.metrics_port=9000"]
    there = plan(tmp_path, *words, f"runner.output_dir={tmp_path / 'larger'}", stages=two)
    assert [here.fingerprint(s) for s in here.recipe.stages] == [there.fingerprint(s) for s in there.recipe.stages]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([STAGES[1], STAGES[1]], "two stages are named 'rl-a'"),
        ([STAGES[0], {**STAGES[2]}], "no reasoning stage comes before it"),
        ([STAGES[4]], "no difficulty_filter or search stage before it"),
        ([{**STAGES[1], "name": "a/b"}], "stages.0.name"),
        ([ROUNDS[2]], "takes model_from 'base', which is no reasoning or sft stage before it"),
        ([ROUNDS[0], ROUNDS[3]], "takes trees_from 'search-1', which is no search stage before it"),
        ([*ROUNDS[:2], {**ROUNDS[4], "reward_model_from": "base"}], "'base', which is no preference stage"),
        ([*ROUNDS[:2], {**ROUNDS[1], "name": "b", "trees_from": ["search-1"]}], "which uses no trees_from"),
        ([{**STAGES[1], "steps": 3}], "stages.0.steps"),
        ([], "stages"),
    ],
)
def test_recipes_that_do_not_fit_together(tmp_path: Path, stages: list[Any], message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"config": "rstar2-tiny-cpu", "stages": stages}))
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=rstar2-agent-14"], "nearest: rstar2-agent-14b"),
        (["recipe=rstar2-tiny", "rl-shrt/runner.max_steps=1"], "has no stage 'rl-shrt'; its stages are copy, sft"),
        (["recipe=rstar2-tiny", "rstar2-qwen2.5-7b-megatron"], "names its configuration itself"),
        (["recipe=rstar2-tiny", "runner.max_step=1"], "stage copy: unknown key runner.max_step"),
    ],
)
def test_bad_command_lines(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_print_config_of_a_recipe_shows_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=rstar2-tiny", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert [line[8:] for line in out.splitlines() if line.startswith("# stage ")] == [
        s.name for s in load_recipe("rstar2-tiny").stages
    ]
    assert len([doc for doc in yaml.safe_load_all(out) if doc]) == 6


def test_one_curve_over_all_stages_with_their_borders(tmp_path: Path) -> None:
    stages = plan(tmp_path)
    for name, steps in (("rl-a", 3), ("rl-b", 2)):
        directory = stages.directory(name)
        directory.mkdir(parents=True)
        rows = [{"step": n, "rollout/pass_rate": 0.1 * n, "time/step": 1.0} for n in range(1, steps + 1)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (directory / "held_out.json").write_text(json.dumps({"before_rl": 0.1, "after_rl": 0.1 * steps, "seconds": 60}))
    done = {name: {"status": "done", "seconds": seconds} for name, seconds in (("sft", 30), ("rl-a", 60), ("rl-b", 45))}
    (stages.root / "recipe.json").write_text(json.dumps({"stages": done}))
    curves = write_curve(stages)
    assert curves is not None and curves.stat().st_size > 10_000
    rows = [json.loads(line) for line in (stages.root / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["stage"], r["stage_step"]) for r in rows] == [
        (1, "rl-a", 1), (2, "rl-a", 2), (3, "rl-a", 3), (4, "rl-b", 1), (5, "rl-b", 2),
    ]  # fmt: skip
    assert json.loads((stages.root / "stages.json").read_text()) == [
        {"name": "rl-a", "first_step": 1, "steps": 3},
        {"name": "rl-b", "first_step": 4, "steps": 2},
    ]
    table = render_table(stages.root)
    assert "held-out pass@1: before RL 0.100, after rl-a 0.300, after rl-b 0.200" in table
    assert "wall time: 2.2 min" in table  # 135 s: of SFT too
