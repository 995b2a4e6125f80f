"""Every parallel layout trains exactly as one process with transformers does: the real loss, five steps, fp32."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actor import reference
from tests.actor.programs import training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings

BATCHES = [sequences(9, seed=i) for i in range(5)]
TP2 = {"tensor_model_parallel_size": 2}
SP = {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
HOST = {"optimizer_cpu_offload": True}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective"}

# Each dimension, and each pair of those that act on each other, once; the other rows are for CI.
DEFAULT = {
    "single, Qwen3",
    "TP2, SP, Qwen3, selective recompute",
    "DP2, overlap",
    "PP2, interleaved, tied, full recompute",
    "TP2, SP, PP2, tied",
    "TP2, SP, CP2",
    "PP2, interleaved, DP2, overlap",
    "PP2, CP2",
    "Llama 3: TP2, SP",
    "host optimizer: TP2, SP",
    "experts: TP2, SP, EP2",
    "experts: PP2, EP2, tied",
}
# name, ranks, actor.model, actor.optim, model
LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any], str]] = [
    ("single", 1, {}, {}, "qwen2"),
    ("single, tied", 1, {}, {}, "qwen2-tied"),
    ("single, Qwen3", 1, {}, {}, "qwen3"),
    ("single, plain optimizer", 1, {}, {"use_distributed_optimizer": False}, "qwen2"),
    ("full recompute", 1, FULL_RECOMPUTE, {}, "qwen2"),
    ("TP2", 2, TP2, {}, "qwen2"),
    ("TP2, tied", 2, TP2, {}, "qwen2-tied"),
    ("TP2, SP", 2, {**TP2, **SP}, {}, "qwen2"),
    ("TP2, SP, Qwen3, selective recompute", 2, {**TP2, **SP, **SELECTIVE_RECOMPUTE}, {}, "qwen3"),
    ("DP2", 2, {}, {}, "qwen2"),
    ("DP2, overlap", 2, {}, OVERLAP, "qwen2-tied"),
    ("PP2", 2, PP2, {}, "qwen2"),
    ("PP2, tied", 2, PP2, {}, "qwen2-tied"),
    ("PP2, interleaved", 2, {**PP2, **VP2}, {}, "qwen2"),
    ("PP2, interleaved, tied, full recompute", 2, {**PP2, **VP2, **FULL_RECOMPUTE}, {}, "qwen2-tied"),
    ("CP2", 2, CP2, {}, "qwen2"),
    ("CP2, Qwen3", 2, CP2, {}, "qwen3"),
    ("TP2, SP, PP2, tied", 4, {**TP2, **SP, **PP2}, {}, "qwen2-tied"),
    ("TP2, SP, CP2", 4, {**TP2, **SP, **CP2}, {}, "qwen2"),
    ("TP2, DP2, overlap", 4, TP2, OVERLAP, "qwen2"),
    ("PP2, interleaved, DP2, overlap", 4, {**PP2, **VP2}, OVERLAP, "qwen2"),
    ("PP2, CP2", 4, {**PP2, **CP2}, {}, "qwen2-tied"),
    ("CP2, DP2", 4, CP2, {}, "qwen2"),
    ("PP4, tied", 4, {"pipeline_model_parallel_size": 4}, {}, "qwen2-tied"),
    ("CP4", 4, {"context_parallel_size": 4}, {}, "qwen2"),
    ("TP2, SP, PP2, interleaved, Qwen3", 4, {**TP2, **SP, **PP2, **VP2}, {}, "qwen3"),
    ("PP2, interleaved, CP2, tied", 4, {**PP2, **VP2, **CP2}, {}, "qwen2-tied"),
    ("TP2, DP2, selective recompute, tied", 4, {**TP2, **SELECTIVE_RECOMPUTE}, {}, "qwen2-tied"),
    ("Llama 3", 1, {}, {}, "llama"),
    ("Llama, tied, DP2, overlap", 2, {}, OVERLAP, "llama-tied"),
    ("Llama 3: TP2, SP", 2, {**TP2, **SP}, {}, "llama"),
    ("Llama 3: CP2", 2, CP2, {}, "llama"),
    ("Llama 3: PP2, interleaved", 2, {**PP2, **VP2}, {}, "llama"),
    ("Llama, tied: PP2, CP2", 4, {**PP2, **CP2}, {}, "llama-tied"),
    ("Llama, tied: TP2, SP, PP2", 4, {**TP2, **SP, **PP2}, {}, "llama-tied"),
    ("Mistral: TP2", 2, TP2, {}, "mistral"),
    ("host optimizer, tied", 1, {}, HOST, "qwen2-tied"),
    ("host optimizer: TP2, SP", 2, {**TP2, **SP}, HOST, "qwen2"),
    ("host optimizer: PP2, interleaved, DP2, overlap", 4, {**PP2, **VP2}, {**OVERLAP, **HOST}, "qwen2"),
    ("host optimizer: experts, EP2", 2, EP2, HOST, "moe"),
    ("experts", 1, {}, {}, "moe"),
    ("experts: EP2", 2, EP2, {}, "moe"),
    ("experts: DP2, overlap, full recompute", 2, FULL_RECOMPUTE, OVERLAP, "moe-tied"),
    ("experts: TP2, SP", 2, {**TP2, **SP}, {}, "moe"),
    ("experts: TP2, SP, EP2", 2, {**TP2, **SP, **EP2}, {}, "moe"),
    ("experts: PP2, EP2, tied", 4, {**PP2, **EP2}, {}, "moe-tied"),
    ("experts: CP2, EP2, DP2", 4, {**CP2, **EP2}, {}, "moe"),
    ("experts: TP2, SP, EP2, DP2, overlap", 4, {**TP2, **SP, **EP2}, OVERLAP, "moe"),
]


@cache
def reference_history(directory: Path) -> list[tuple[float, float]]:
    actor, _, algorithm = settings()
    return reference.train(reference.load(directory), BATCHES, actor, algorithm)


@cache
def entropy_after_tool(directory: Path) -> float:
    """Of the first 8 tokens of every turn but the first, before the first step."""
    model, values = reference.load(directory), []
    for sequence in BATCHES[0]:
        with torch.no_grad():
            entropy = reference.log_probs_entropy(model, sequence, settings()[2].sampling_params.temperature)[1]
        turn = place = 0
        for i in range(1, sequence.length):
            begins = sequence.loss_mask[i] and not sequence.loss_mask[i - 1]
            turn, place = turn + int(begins), 0 if begins else place + 1
            if sequence.loss_mask[i] and turn > 1 and place < 8:
                values.append(float(entropy[i - 1]))
    return sum(values) / len(values)


@pytest.mark.parametrize(
    "name, ranks, model, optim, which",
    [pytest.param(*row, id=row[0], marks=[] if row[0] in DEFAULT else pytest.mark.ci) for row in LAYOUTS],
)
def test_layout_matches_transformers(
    pool: RankPool, models: dict[str, Path], name: str, ranks: int, model: dict[str, Any], optim: dict[str, Any], which: str
) -> None:
    expected = reference_history(models[which])
    results = pool.run(training.train, ranks, settings(model=model, optim=optim), models[which], BATCHES)
    for step, (loss, norm) in enumerate(expected):
        assert results[0][step]["actor/policy_loss"] == pytest.approx(loss, abs=1e-5)
        assert results[0][step]["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert results[0][0]["actor/entropy_after_tool"] == pytest.approx(entropy_after_tool(models[which]), abs=1e-5)
    for other in results[1:]:
        for mine, first in zip(other, results[0]):
            for key in ("actor/policy_loss", "actor/grad_norm", "actor/entropy", "actor/logprob_diff_max"):
                assert mine[key] == first[key], f"{key} differs between ranks"


@pytest.mark.parametrize(
    "ranks, model, where, which",
    [
        pytest.param(1, {}, {}, "qwen2", id="single", marks=pytest.mark.ci),
        pytest.param(2, TP2, {}, "qwen2", id="TP2", marks=pytest.mark.ci),
        pytest.param(2, {}, {**OVERLAP, **HOST}, "qwen2", id="host optimizer, DP2, overlap"),
        pytest.param(2, {**PP2, **VP2}, {}, "qwen2-tied", id="PP2, interleaved, tied", marks=pytest.mark.ci),
        pytest.param(2, CP2, {}, "qwen3", id="CP2, Qwen3", marks=pytest.mark.ci),
        pytest.param(4, {**TP2, **SP, **PP2}, {}, "qwen2-tied", id="TP2, SP, PP2, tied"),
        pytest.param(
            4, {**CP2, **FULL_RECOMPUTE}, OVERLAP, "qwen2", id="CP2, DP2, overlap, full recompute", marks=pytest.mark.ci
        ),
        pytest.param(2, EP2, {}, "moe", id="experts, EP2", marks=pytest.mark.ci),
        pytest.param(2, {**TP2, **SP}, {}, "llama", id="Llama 3, TP2, SP", marks=pytest.mark.ci),
    ],
)
def test_bf16_stays_near_fp32(
    pool: RankPool, models: dict[str, Path], ranks: int, model: dict[str, Any], where: dict[str, Any], which: str
) -> None:
    """On trajectories of the policy itself: far from it, rounding moves whole tokens across the clip."""
    hf = reference.load(models[which])
    batches = [sequences(9, seed=i) for i in range(5)]
    with torch.no_grad():
        for sequence in (s for batch in batches for s in batch):
            scores = [0.0, *reference.log_probs(hf, sequence, 0.9).tolist()]
            sequence.rollout_logprobs = np.array(scores, np.float32) * sequence.loss_mask
    optim = {"lr": 1e-4}
    actor, _, algorithm = settings(optim=optim)
    expected = reference.train(hf, batches, actor, algorithm)
    config = settings(model={**model, "precision": "bf16"}, optim={**optim, **where})
    results = pool.run(training.train, ranks, config, models[which], batches)
    for step, (loss, norm) in enumerate(expected):
        assert results[0][step]["actor/policy_loss"] == pytest.approx(loss, abs=2e-2)
        assert results[0][step]["actor/grad_norm"] == pytest.approx(norm, rel=2e-2)
