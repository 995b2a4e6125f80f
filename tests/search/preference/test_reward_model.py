"""A process preference model as the scorer of a search: what is refused, and a search with every part real."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from rstar2_megatron.search.__main__ import main
from rstar2_megatron.search.preference.reward_model import (
    SCALE,
    check_reward_model,
    identity_of,
    policy_rollout,
    reward_rollout,
)
from rstar2_megatron.search.tree_file import tree_of
from rstar2_megatron.settings.schema import RolloutModelSettings, RolloutSettings
from tests.actor.tiny import write_model
from tests.rollout.memorised import CONVERSATIONS, SETTINGS
from tests.rollout.tiny import make_model


def write_reward_model(policy: Path, directory: Path) -> Path:
    """A random reward model with the policy's tokenizer."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(0, 0.5)
    directory.mkdir()
    for file in policy.glob("tokenizer*"):
        shutil.copy(file, directory)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def reward(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(model, tmp_path_factory.mktemp("rewards") / "reward")


def test_a_model_of_the_same_vocabulary_is_taken(model: Path, reward: Path) -> None:
    check_reward_model(reward, model, 4096)
    assert identity_of(reward)["reward_weights"][0][0] == "model.safetensors"


def test_refusals(model: Path, reward: Path, tmp_path: Path) -> None:
    other = write_reward_model(make_model(tmp_path / "other", words=260), tmp_path / "other-reward")
    with pytest.raises(ValueError, match=r"has another vocabulary than the policy .* \(\d+ and \d+ tokens; "):
        check_reward_model(other, model, 100)
    with pytest.raises(ValueError, match="holds a Qwen2ForCausalLM, which gives no scores"):
        check_reward_model(model, model, 100)
    with pytest.raises(ValueError, match="reads 4096 tokens, solutions may have 5000"):
        check_reward_model(reward, model, 5000)
    bare = tmp_path / "bare"
    shutil.copytree(reward, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match=r"has no tokenizer|has another vocabulary"):
        check_reward_model(bare, model, 100)
    headless = shutil.copytree(reward, tmp_path / "headless")
    save_file(
        {k: v for k, v in load_file(reward / "model.safetensors").items() if "score" not in k}, headless / "model.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"--reward-model .*headless has no tensor score.weight, which its config.json asks for"
    ):
        check_reward_model(headless, model, 100)
    experts = write_model(tmp_path / "experts", experts={})
    config = json.loads((experts / "config.json").read_text())
    config["architectures"], config["id2label"] = ["Qwen3MoeForSequenceClassification"], {"0": "LABEL_0"}
    (experts / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Qwen3MoeForSequenceClassification, which SGLang does not serve"):
        check_reward_model(experts, model, 100)


def test_bad_input_ends_with_2(model: Path, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "6*7?", "solutions": ["42"], "query_id": "q"}) + "\n")
    words = ["--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--reward-model"]
    assert main([*words, str(model)]) == 2
    assert "gives no scores" in capsys.readouterr().err
    assert main([*words, str(reward), "search.guide=answers"]) == 2
    assert "set search.guide=answers+scores" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_engines_share_a_gpus_memory() -> None:
    """SGLang's fraction is of the memory that is free when an engine starts: 80 GB, then what the policy's leaves."""
    rollout = RolloutSettings(model=RolloutModelSettings(model_path="p"), gpu_memory_utilization=0.8)
    policy = policy_rollout(rollout, 0.45, on_gpu=True).gpu_memory_utilization * 80
    served = reward_rollout(rollout, "r", 0.45, 1, on_gpu=True)
    assert policy == pytest.approx(0.8 * 0.55 * 80)
    assert served.gpu_memory_utilization * (80 - policy) == pytest.approx(0.8 * 0.45 * 80)
    assert served.model.model_path == "r" and served.sglang.server_args["base_gpu_id"] == 1
    assert policy_rollout(rollout, 0.45, on_gpu=False) is rollout


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_values_of_a_search_are_the_reward_models(memorised_model: Path, tmp_path: Path) -> None:
    """Beam search: every value is tanh(score / 5) of transformers' own class on the path's token ids."""
    reward = write_reward_model(memorised_model, tmp_path / "reward")
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    rows = [{"prompt": f"{name}?", "solutions": ["42"], "query_id": name} for name in CONVERSATIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", str(memorised_model), "--data", str(data), "--out", str(out), "--mode", "beam",
             "--reward-model", str(reward), "--candidates", "3", "--depth", "2", "search.beam_width=2", "--max-tokens", "400",
             "search.temperature=0.6", "rollout.max_total_tokens=8192", "rollout.max_running_requests=16",
             "tools.codejudge.time_limit_s=1", f"agentloop.system_prompt='{SETTINGS.system_prompt}'",
             "agentloop.user_prefix=''", "rollout.model.precision=fp32"]  # fmt: skip
    assert main(words) == 0
    model: Any = AutoModelForSequenceClassification.from_pretrained(reward, dtype=torch.float32)
    checked = 0
    for line in (out / "beam.jsonl").read_text().splitlines():
        row = json.loads(line)
        for node in tree_of(row).root.walk():
            if node.step is None or node.step.value is None:
                continue
            ids = np.concatenate([row["prompt_ids"], *(step.ids for step in node.steps)])
            with torch.no_grad():
                score = float(model(input_ids=torch.tensor(ids).long()[None]).logits[0, 0])
            assert node.step.value == pytest.approx(math.tanh(score / SCALE), abs=1e-4)
            checked += 1
    assert checked >= 6
