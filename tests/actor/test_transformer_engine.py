"""The actor on TransformerEngine's own Python, with its kernels in torch: against the local layers, and checkpoints of both.

A change of the project or of megatron-core's use of TransformerEngine that breaks the GPU's path is red here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.host_memory import load_bytes
from rstar2_megatron.settings.planning.memory import layer_activations
from tests.actor.programs import checkpoints, engine_layers
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings
from tests.actor.transformer_engine import stand_in

pytestmark = pytest.mark.ci
BATCH = sequences(12, seed=3)
OVERLAP = {"overlap_grad_reduce": True}
BF16 = {"precision": "bf16"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
HOST = {**OVERLAP, "optimizer_cpu_offload": True}


@pytest.fixture(scope="module")
def engine_pool() -> Iterator[RankPool]:
    """Ranks that have TransformerEngine."""
    ranks = RankPool(stand_in.install)
    yield ranks
    ranks.close()


LAYOUTS = [
    ("qwen2", 1, {}, {}),
    ("qwen2-tied", 2, PP2, OVERLAP),
    ("qwen3", 2, TP2, HOST),
    ("llama", 2, RECOMPUTE, {**OVERLAP, "overlap_param_gather": True}),
    ("mistral", 1, {}, OVERLAP),
    ("moe", 2, {**TP2, **EP2}, OVERLAP),
    ("moe", 2, {**EP2, **RECOMPUTE}, HOST),
]


@pytest.mark.parametrize(("model", "ranks", "layout", "optim"), LAYOUTS)
def test_layers_of_transformer_engine_train_as_the_local_ones(
    engine_pool: RankPool,
    pool: RankPool,
    models: dict[str, Path],
    tmp_path: Path,
    model: str,
    ranks: int,
    layout: dict[str, Any],
    optim: dict[str, Any],
) -> None:
    """Log-probs, and two steps, a checkpoint, a step after it and again after its load, in bf16."""
    config = settings(model={"precision": "bf16", **layout}, optim=optim)
    theirs, ours = (
        each.run(engine_layers.run, ranks, config, models[model], tmp_path / name, BATCH)[0]
        for each, name in ((engine_pool, "engine"), (pool, "local"))
    )
    assert {"generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "fused_attn_fwd", "fused_attn_bwd"} <= set(theirs.kernels)
    assert ("multi_tensor_adam" in theirs.kernels) != bool(optim.get("optimizer_cpu_offload"))
    assert not ours.kernels
    assert np.abs(theirs.logprobs - ours.logprobs).mean() < 0.02
    assert theirs.grad_norms == pytest.approx(ours.grad_norms, rel=0.05)
    assert theirs.restored and ours.restored
    assert theirs.after_load == pytest.approx(theirs.after_save, rel=1e-3)


def test_a_load_holds_the_moments_once(engine_pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """FusedAdam's own load would hold them twice: more than a GPU has, where a model fills it."""
    config = settings(model=BF16)
    piece = 400_000
    counted = engine_pool.run(checkpoints.save_and_count, 2, config, models["qwen2"], tmp_path / "actor", BATCH, 20_000, piece)
    planned = load_bytes(config[0], ModelConfig.from_directory(models["qwen2"]), piece=piece)
    assert all(loaded <= 1.02 * planned for _, loaded, _ in counted), (planned, counted)


@pytest.mark.parametrize(
    ("model", "ranks", "layout"), [("qwen2", 1, {}), ("qwen3", 1, {}), ("moe", 1, {}), ("qwen2", 2, TP2), ("qwen3", 2, TP2)]
)
def test_the_plan_counts_what_a_layer_keeps(
    engine_pool: RankPool, models: dict[str, Path], model: str, ranks: int, layout: dict[str, Any]
) -> None:
    config = settings(model={"precision": "bf16", **layout})
    planned = layer_activations(ModelConfig.from_directory(models[model]), ranks, ranks)
    kept = engine_pool.run(engine_layers.kept_by_a_layer, ranks, config, models[model], BATCH)[0]
    assert kept and [count for _, count in kept] == [tokens * planned for tokens, _ in kept]


@pytest.mark.parametrize("saved_by", ["engine", "local"])
@pytest.mark.parametrize(
    ("model", "layout", "optim"),
    [("qwen3", TP2, OVERLAP), ("moe", EP2, OVERLAP), ("qwen2", TP2, HOST)],
    ids=["dense", "experts", "host optimizer"],
)
def test_a_checkpoint_goes_on_with_transformer_engine_and_without(
    engine_pool: RankPool,
    pool: RankPool,
    models: dict[str, Path],
    tmp_path: Path,
    model: str,
    layout: dict[str, Any],
    optim: dict[str, Any],
    saved_by: str,
) -> None:
    """It was installed, or removed, between two runs: the next steps are the same within bf16, at a rate that moves little."""
    config = settings(model={"precision": "bf16", **layout}, optim={**optim, "lr": 1e-4})
    arguments = (config, models[model], tmp_path / "actor", BATCH)
    saver, loader = (engine_pool, pool) if saved_by == "engine" else (pool, engine_pool)
    before = saver.run(engine_layers.train_and_save, 2, *arguments)[0]
    assert loader.run(engine_layers.load_and_train, 2, *arguments)[0] == pytest.approx(before, rel=0.03)
