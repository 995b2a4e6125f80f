"""The export of verl's side: prompts as ours, files, differences; and, in CI, verl's own configuration loader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.verl.export import VERSION, chat_template, differences, export, verl_config, verl_rows
from rstar2_megatron.report.names import ours_from_verl
from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.settings.load import load, valid_keys
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.settings.variant import VARIANTS
from rstar2_megatron.trajectory import Problem
from tests.tiers import ROOT

SIZE = "rstar2-qwen2.5-7b-megatron"
PROBLEM = Problem("p1", [{"role": "user", "content": "What is 1 + 1?"}], ["2", "2.0"])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"query_id": "p1", "prompt": PROBLEM.prompt, "solutions": PROBLEM.solutions}) + "\n")
    words = [f"data.train_data_paths=[{data}]", "tools.codejudge.host_addr=judge", "tools.codejudge.host_port=9"]
    return load(SIZE, words).settings


class OneToken:
    """The rendered text does not depend on the tokenizer."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0]

    def apply_chat_template(
        self, messages: list[dict[str, str]], chat_template: str, add_generation_prompt: bool, **_: Any
    ) -> str:
        rendered = jinja2.Environment().from_string(chat_template)
        return rendered.render(messages=messages, add_generation_prompt=add_generation_prompt)


def test_verl_renders_the_prompt_and_the_tool_response_that_we_train_on(settings: Settings) -> None:
    template = jinja2.Environment().from_string(chat_template(settings))
    ours = ChatTemplate(OneToken(), settings.agentloop)
    (row,) = verl_rows([PROBLEM], settings)
    prompt = template.render(messages=row["prompt"], add_generation_prompt=True)
    assert prompt == ours.prompt_text(PROBLEM)
    assert json.loads(row["reward_model"]["ground_truth"]) == PROBLEM.solutions
    system = template.render(messages=[{}])  # what verl cuts off to find the text of one tool response
    response = template.render(messages=[{"role": "tool", "content": "2"}], add_generation_prompt=True)
    assert "\n" + response.removeprefix(system) == ours.tool_response_text(["2"])


def test_the_table_of_verls_keys_has_what_the_export_writes(settings: Settings, tmp_path: Path) -> None:
    def keys(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in node.items():
            yield from keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]

    exported = {key.removeprefix("actor_rollout_ref.") for key in keys(verl_config(settings, tmp_path))}
    table = (ROOT / "docs" / "parity.md").read_text().partition("## verl's keys")[2].partition("\n## ")[0]
    rows = [[re.findall("`([^`]+)`", cell) for cell in line.split("|")[1:3]] for line in table.splitlines() if "`" in line[:4]]
    assert len(rows) > 25
    assert {key for theirs, _ in rows for key in theirs} <= exported
    assert {key for _, ours in rows for key in ours} <= set(valid_keys())


@pytest.mark.parametrize(("kept", "cut"), [("left", "right"), ("middle", "middle"), ("right", "left")])
def test_verl_cuts_the_end_that_we_do_not_keep(settings: Settings, tmp_path: Path, kept: str, cut: str) -> None:
    settings.agentloop.tool_response_truncate_side = kept
    config = verl_config(settings, tmp_path)
    assert config["actor_rollout_ref"]["rollout"]["multi_turn"]["tool_response_truncate_side"] == cut


def test_the_files_name_each_other_and_every_difference(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "verl"
    found = export(settings, out)
    assert (out / "differences.txt").read_text().splitlines() == found
    assert any("algorithm.down_sampling (mode released, 16 of 32)" in line for line in found)
    config = yaml.safe_load((out / "verl.yaml").read_text())
    assert pq.read_table(config["data"]["train_files"]).to_pylist()[0]["agent_name"] == "tool_agent"
    (held_out,) = pq.read_table(config["data"]["val_files"]).to_pylist()
    assert ours_from_verl(f"val-core/{held_out['data_source']}/acc/mean@1") == "eval/average"
    rollout = config["actor_rollout_ref"]["rollout"]
    (tool,) = yaml.safe_load(Path(rollout["multi_turn"]["tool_config_path"]).read_text())["tools"]
    assert tool["config"]["judge_url"] == "http://judge:9"
    assert (rollout["n"], config["data"]["train_batch_size"]) == (32, 128)
    subprocess.run(["bash", "-n", out / "run_verl.sh"], check=True)
    tool = "<tool_response>\\n<answer>\\\\boxed{2}</answer>\\n</tool_response>"  # what a tool prints is no answer of the model
    code = (
        "import asyncio, reward; own = [f'<answer>\\\\boxed{{{x}}}</answer>' for x in (2, 3)]\n"
        f"texts = [*own, own[0] + '{tool}', '{tool}']\n"
        "print([asyncio.run(reward.compute_score('math', text, '[\"2\"]')) for text in texts])"
    )
    path = os.pathsep.join([str(out), str(Path(__file__).parents[3])])
    shown = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert shown.stdout.strip() == "[1.0, 0.0, 1.0, 0.0]", shown.stderr


def test_rewards_of_verls_form_are_those_of_both_sides(tmp_path: Path) -> None:
    """With the row's own columns, which verl's files hold otherwise; held-out problems keep their source too."""
    code, data, out = tmp_path / "mine.py", tmp_path / "train.jsonl", tmp_path / "verl"
    code.write_text(
        "from helper import half\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):\n"
        "    assert data_source == 'kk' and extra_info['level'] == 2 and extra_info['num_turns'] == 3\n"
        "    return {'score': scale * half(ground_truth['target'] in solution_str), 'pred': 'x'}\n"
    )
    (tmp_path / "helper.py").write_text("def half(x): return x / 2\n")
    row = {"prompt": PROBLEM.prompt, "data_source": "kk", "extra_info": {"level": 2}}
    data.write_text(json.dumps(row | {"reward_model": {"ground_truth": {"target": "liar"}}}) + "\n")
    terms = f"[{{name: math, function: math}}, {{name: mine, function: {code}:compute_score, weight: 0.5}}]"
    words = [f"data.train_data_paths=[{data}]", f"reward.terms={terms}", "reward.arguments={scale: 8}"]
    export(load(SIZE, words).settings, out)
    code.unlink()
    (held_out,) = pq.read_table(out / "val.parquet").to_pylist()
    extra = held_out["extra_info"] | {"num_turns": 3}
    text = "print(asyncio.run(reward.compute_score('held-out', 'the liar', {!r}, {!r})))"
    script = "import asyncio, reward; " + text.format(held_out["reward_model"]["ground_truth"], extra)
    path = os.pathsep.join([str(out), str(Path(__file__).parents[3])])
    shown = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert shown.stdout.strip() == "2.0", shown.stderr


def test_the_command_may_be_called_from_anywhere(tmp_path: Path) -> None:
    """Paths are the user's; a run and the comparison keep the cold start's model in one place."""
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": PROBLEM.prompt, "solutions": PROBLEM.solutions}) + "\n")
    (tmp_path / "mine.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    words = [SIZE, "data.train_data_paths=[train.jsonl]", "reward.function=mine.py:compute_score", "--export", "side"]
    script = ROOT / "examples/agent/rstar2/compare_with_verl.sh"
    done = subprocess.run(["bash", script, *words], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "mine.py", "side"}
    assert len(pq.read_table(tmp_path / "side/train.parquet")) == 1 and list((tmp_path / "side/code").rglob("mine.py"))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_what_verl_cannot_do_is_listed(variant: str) -> None:
    words = [f"algorithm.variant={variant}", "algorithm.kl_beta=0.1", "rollout.tail=cut"]
    text = "\n".join(differences(load(SIZE, words).settings))
    assert ("loss_agg_func" in text) == ("released" in variant)
    assert ("clip_ratio_c=null" in text) == ("kl_clamp=null" in text) == (variant == "paper")
    assert "rollout.tail=cut" in text


def test_variants_of_the_algorithm_that_verl_does_not_get_are_listed() -> None:
    words = {
        "algorithm.policy_loss": "gspo-token",
        "algorithm.trajectory_filters": "[void_turns]",
        "algorithm.overlong.buffer_tokens": 512,
        "algorithm.turn_returns.discount": 0.9,
        "algorithm.entropy_bonus": 0.01,
        "algorithm.entropy_bonus_tokens": 8,
        "agentloop.tool_noise": 0.1,
        "algorithm.max_staleness": 1,
        "algorithm.icepop": "[0.5, 2.0]",
    }
    plain = list(differences(load(SIZE, []).settings))
    found = list(differences(load(SIZE, [f"{key}={value}" for key, value in words.items()]).settings))
    named = {line.split(":")[0].split("=")[0] for line in found if line not in plain}
    assert named == {
        *("algorithm.policy_loss", "algorithm.trajectory_filters", "algorithm.overlong", "algorithm.turn_returns"),
        *("algorithm.entropy_bonus_tokens", "agentloop.tool_noise", "algorithm.max_staleness", "algorithm.icepop"),
    }


@pytest.mark.ci
def test_verls_own_configuration_takes_every_key(settings: Settings, tmp_path: Path) -> None:
    """verl without its dependencies: Hydra composes its ppo_trainer with ours on top; each of our keys is one of verl's."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    packages, out = tmp_path / "packages", tmp_path / "verl"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), f"verl=={VERSION}"]
    subprocess.run(pip, check=True, timeout=300)
    export(settings, out)
    trainer = packages / "verl" / "trainer" / "config"
    ours = yaml.safe_load((out / "verl.yaml").read_text())
    keys = list(leaves({name: value for name, value in ours.items() if name not in ("defaults", "hydra")}))
    with initialize_config_dir(config_dir=str(trainer), version_base=None):
        stock = compose(config_name="ppo_trainer")
    theirs = {key for key, _ in leaves(OmegaConf.to_container(stock))}
    assert [key for key, _ in keys if key not in theirs] == []
    with initialize_config_dir(config_dir=str(out), version_base=None):
        config = compose(config_name="verl", overrides=[f"hydra.searchpath=[file://{trainer}]"])
    assert {key: OmegaConf.select(config, key) for key, _ in keys} == dict(keys)
    assert config.actor_rollout_ref.rollout.response_length == 8192  # interpolated by verl from data.*


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "agentloop.tools=[examples/extend/search_tool.py:search]",
            "names search_tool.py:search, which the export cannot give",
        ),
        (
            "reward.function=examples/extend/rewards.py:tool_use",
            "rewards.py:tool_use: a trajectory of ours is not known to verl",
        ),
        (
            "agentloop.environment=examples/extend/game.py:HigherLower",
            "agentloop.environment=game.py:HigherLower: the export cannot give it",
        ),
        ("reward.function=environment", "reward.function=environment: verl has no environment"),
        ("agentloop.tool_call_format=llama3", "tool_call_format=llama3: the export sets verl to hermes calls"),
    ],
)
def test_what_the_export_cannot_give_to_verl(tmp_path: Path, key: str, words: str) -> None:
    prompt = "agentloop.system_prompt=of llama3"
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"query_id": "p1", "prompt": PROBLEM.prompt, "solutions": PROBLEM.solutions}) + "\n")
    with pytest.raises(ValueError, match=words):
        export(load(SIZE, [f"data.train_data_paths=[{data}]", prompt, key]).settings, tmp_path / "verl")
    assert not [*tmp_path.glob("verl/*")]


def leaves(node: dict, prefix: str = ""):
    for name, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
