"""The reward model: every layout trains as a loop over transformers' own class does, and exports what that class loads."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rstar2_megatron.actor.convert import convert
from rstar2_megatron.algorithm.preference import Comparison, Pairs
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import PreferenceSettings
from rstar2_megatron.sft.training import learning_rate, sft_phase_of
from tests.actor.programs import preferences
from tests.actor.ranks import RankPool
from tests.actor.tiny import LLAMA3_ROPE, settings, write_model

TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
STEPS = 3


def comparisons(count: int, seed: int) -> list[Comparison]:
    """Ragged ones: one to two prefixes on each side, now and then without one of the pairs."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return np.array([rng.randrange(1, 320) for _ in range(rng.randint(low, high))], np.int32)

    found = []
    for _ in range(count):
        better, worse = rng.choice([(2, 2), (2, 2), (1, 2), (1, 1)])
        pairs = [(i, better + j) for i in range(better) for j in range(worse)]
        found.append(Comparison(ids(3, 12), [ids(1, 25) for _ in range(better + worse)], pairs[:3]))
    return found


BATCHES = [comparisons(5, seed) for seed in range(STEPS)]


@pytest.fixture(scope="module")
def reward_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reward models with random heads, and "policy": a language model."""
    root = tmp_path_factory.mktemp("reward-models")
    models = {"policy": write_model(root / "policy", tie=True)}
    for name, options in {
        "qwen2": {"tie": True},
        "qwen3": {"qwen3": True},
        "llama": {"llama": LLAMA3_ROPE},
        "mistral": {"mistral": True},
        "moe": {"experts": {}},
    }.items():
        policy = write_model(root / f"{name}-policy", **options)  # type: ignore[arg-type]
        models[name] = root / name
        model = load(policy, num_labels=1)
        with torch.no_grad():
            model.score.weight.normal_(0, 0.2)
        model.save_pretrained(models[name])
    return models


def load(directory: Path, **options: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa", **options
    )


def scores_of(model: Any, batch: list[Comparison]) -> torch.Tensor:
    sequences = [s.input_ids for c in batch for s in c.sequences()]
    return torch.stack([model(input_ids=torch.tensor(ids).long()[None], use_cache=False).logits[0, 0] for ids in sequences])


def loss_of(scores: torch.Tensor, batch: list[Comparison]) -> torch.Tensor:
    """The mean over comparisons of the mean over pairs of -log sigmoid of the difference, written out."""
    total, first = torch.zeros(()), 0
    for one in batch:
        own = [torch.sigmoid(scores[first + i] - scores[first + j]).log() for i, j in one.pairs]
        total = total - torch.stack(own).mean()
        first += len(one.continuations)
    return total / len(batch)


@cache
def expected(directory: Path) -> tuple[list[tuple[float, float]], torch.Tensor, float]:
    """Loss and gradient norm of every step; after them, scores and loss of the first batch."""
    actor, _, _ = settings()
    optim, model = actor.optim, load(directory)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_eps)
    history = []
    for number, batch in enumerate(BATCHES):
        for group in adam.param_groups:
            group["lr"] = optim.lr * min(1.0, (number + 1) / actor.lr_sched.lr_warmup_iters)
        adam.zero_grad()
        loss = loss_of(scores_of(model, batch), batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        adam.step()
        history.append((float(loss.detach()), float(norm)))
    with torch.no_grad():
        scores = scores_of(model, BATCHES[0])
    return history, scores, float(loss_of(scores, BATCHES[0]))


LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any], str]] = [
    ("single", 1, {}, {}, "qwen2"),
    ("TP2", 2, TP2, {}, "qwen2"),
    ("TP2, SP", 2, {**TP2, **SP}, {}, "llama"),
    ("PP2", 2, PP2, {}, "qwen2"),
    ("PP2, interleaved", 2, {**PP2, **VP2}, {}, "qwen3"),
    ("CP2", 2, CP2, {}, "qwen2"),
    ("DP2, overlap", 2, {}, OVERLAP, "mistral"),
    ("host optimizer, DP2", 2, {}, {"optimizer_cpu_offload": True}, "qwen2"),
]
LARGE: list[tuple[str, int, dict[str, Any], dict[str, Any], str]] = [
    ("experts: EP2", 2, {"expert_model_parallel_size": 2}, {}, "moe"),
    ("TP2, SP, PP2", 4, {**TP2, **SP, **PP2}, {}, "qwen2"),
    ("TP2, SP, CP2", 4, {**TP2, **SP, **CP2}, {}, "qwen2"),
    ("PP2, interleaved, CP2", 4, {**PP2, **VP2, **CP2}, {}, "llama"),
    ("PP2, DP2, overlap", 4, PP2, OVERLAP, "qwen2"),
    ("CP2, DP2", 4, CP2, {}, "qwen2"),
]


@pytest.mark.parametrize(
    "name, ranks, model, optim, which",
    [pytest.param(*row, id=row[0]) for row in LAYOUTS] + [pytest.param(*row, id=row[0], marks=pytest.mark.ci) for row in LARGE],
)
def test_layout_matches_transformers(
    pool: RankPool,
    reward_models: dict[str, Path],
    tmp_path: Path,
    name: str,
    ranks: int,
    model: dict[str, Any],
    optim: dict[str, Any],
    which: str,
) -> None:
    history, scores, last = expected(reward_models[which])
    target = tmp_path / "export"
    config = settings(model=model, optim=optim)
    results = pool.run(preferences.train, ranks, config, reward_models[which], BATCHES, target)
    for number, (loss, norm) in enumerate(history):
        assert results[0][0][number]["preference/loss"] == pytest.approx(loss, abs=1e-5)
        assert results[0][0][number]["preference/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert results[0][1] == pytest.approx(scores.tolist(), abs=2e-4)
    assert results[0][2]["loss"] == pytest.approx(last, abs=1e-4)
    for other in results[1:]:
        assert other[1:] == results[0][1:]
        for mine, first in zip(other[0], results[0][0]):
            assert all(mine[f"preference/{key}"] == first[f"preference/{key}"] for key in ("loss", "margin"))
    exported = load(target)
    assert type(exported).__name__.endswith("ForSequenceClassification") and exported.num_labels == 1
    with torch.no_grad():
        again = scores_of(exported, BATCHES[0])
    assert results[0][1] == pytest.approx(again.tolist(), abs=1e-5)


def test_begins_at_a_policy_with_a_loss_of_ln_2(pool: RankPool, reward_models: dict[str, Path], tmp_path: Path) -> None:
    """The head of the policy is left out; a first step can only move the new head."""
    target = tmp_path / "export"
    arguments = settings(), reward_models["policy"], BATCHES[:1], target
    ((history, scores, validation),) = pool.run(preferences.train, 1, *arguments)
    assert history[0]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert history[0]["preference/accuracy"] == pytest.approx(0.5)
    assert validation["loss"] < math.log(2) and validation["accuracy"] > 0.5
    before, after = (load_file(directory / "model.safetensors") for directory in (reward_models["policy"], target))
    assert after.keys() - before.keys() == {"score.weight"} and after["score.weight"].abs().max() > 0
    layer = "model.layers.0.input_layernorm.weight"  # norms have no weight decay
    assert torch.equal(before[layer], after[layer])
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert ModelConfig.from_directory(target, scores=True).num_parameters == sum(t.numel() for t in after.values())
    assert len(scores) == int(Pairs.of(BATCHES[0]).sizes.sum())


@pytest.mark.parametrize(
    "ranks, model, other_ranks, other",
    [
        pytest.param(2, PP2, 2, TP2, id="PP2 to TP2"),
        pytest.param(2, {**TP2, **SP}, 1, {}, id="TP2, SP to single"),
        pytest.param(4, {**TP2, **SP, **PP2}, 2, CP2, id="TP2, SP, PP2 to CP2", marks=pytest.mark.ci),
    ],
)
def test_resumes_in_another_layout(
    pool: RankPool,
    reward_models: dict[str, Path],
    tmp_path: Path,
    ranks: int,
    model: dict[str, Any],
    other_ranks: int,
    other: dict[str, Any],
) -> None:
    start, directory = reward_models["qwen2"], tmp_path / "actor"
    (saved, then), *_ = pool.run(preferences.save_and_continue, ranks, settings(model=model), start, directory, BATCHES)
    for settings_, count in ((settings(model=model), ranks), (settings(model=other), other_ranks)):
        for checksums, metrics in pool.run(preferences.load_and_continue, count, settings_, start, directory, BATCHES[1]):
            assert checksums == saved
            assert metrics["preference/loss"] == pytest.approx(then["preference/loss"], abs=1e-5)
            assert metrics["preference/grad_norm"] == pytest.approx(then["preference/grad_norm"], rel=1e-4)
    convert(directory, start, tmp_path / "converted")
    assert "score.weight" in load_file(tmp_path / "converted" / "model.safetensors")
    load(tmp_path / "converted")


def test_what_cannot_be_trained_is_refused(pool: RankPool, reward_models: dict[str, Path], tmp_path: Path) -> None:
    arguments = settings(), reward_models["qwen2"]
    long = Comparison(np.ones(200, np.int32), [np.ones(60, np.int32)] * 2, [(0, 1)])
    with pytest.raises(RuntimeError, match=r"one comparison have 520 tokens, a micro-batch has room for 256"):
        pool.run(preferences.train, 1, *arguments, [[long]], tmp_path)
    with pytest.raises(ValueError, match="Qwen2ForSequenceClassification is not supported"):
        ModelConfig.from_directory(reward_models["qwen2"])
    raw = json.loads((reward_models["qwen2"] / "config.json").read_text())
    with pytest.raises(ValueError, match="a reward model has one label"):
        ModelConfig.from_dict({**raw, "id2label": {"0": "no", "1": "yes"}}, scores=True)


def test_a_resumed_phase_goes_on_as_the_uninterrupted_one(
    pool: RankPool, reward_models: dict[str, Path], tmp_path: Path
) -> None:
    rows = comparisons(10, seed=7)
    section = PreferenceSettings(batch_size=4, epochs=2, lr=2e-3)
    phase = sft_phase_of(section, len(rows))
    assert (phase.steps, phase.decay, phase.warmup_steps) == (5, "linear", 0)
    assert [learning_rate(phase, step) for step in range(5)] == pytest.approx([2e-3, 1.6e-3, 1.2e-3, 0.8e-3, 0.4e-3])
    arguments = settings(), reward_models["policy"], rows, phase, tmp_path / "actor"
    ((losses, found),) = pool.run(preferences.run_phase, 1, *arguments, 0)
    ((rest, again),) = pool.run(preferences.run_phase, 1, *arguments, 2)
    assert len(losses) == 5 and rest == losses[2:] and again == found
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and found["loss"] < losses[0]
    # validation is the mean over comparisons, whatever the batches are: the last one here holds two
    assert found["accuracy"] > 0.5 and found["margin"] > 0
