"""The shipped sizes with TransformerEngine's layers: made, saved and filled in, as far as that goes without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.actor.network.layer_spec import choose_implementation
from rstar2_megatron.actor.network.model import transformer_config
from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.settings.load import config_names, load
from tests.install.engine_models import SHAPES, THIN, WORLD

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]  # a program of its own imports all engines, on a busy machine

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
needs_engine = pytest.mark.skipif(
    not HAS_ENGINE, reason="TransformerEngine is not installed; scripts/try_gpu_install.sh runs this where it is"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return built_by(tmp_path_factory.mktemp("models") / "models.json")


@pytest.fixture(scope="module")
def built_local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With megatron-core's own layers, which every environment has."""
    return built_by(tmp_path_factory.mktemp("models") / "local.json", "--local")


def built_by(out: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.install.engine_models", str(out), *options],
        capture_output=True,
        text=True,
        timeout=840,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


# Of a thin model: nine of each Llama layer, three around the layers; Qwen2 has three biases more a layer, Qwen3 two norms.
TENSORS = {"qwen2": 51, "qwen2-tied": 50, "qwen3": 47, "llama": 39, "moe": 111}


@needs_engine
@pytest.mark.parametrize("rank", [0, WORLD - 1])
@pytest.mark.parametrize("size", SHAPES)
def test_a_shipped_size_is_built_and_its_names_are_whole(built: dict[str, Any], size: str, rank: int) -> None:
    one = built["shapes"][f"{size} rank {rank}"]
    assert "error" not in one, one["error"]
    experts = one["experts_on_this_rank"]
    assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear", "RMSNorm"} <= set(one["layers"])
    assert ("TEColumnParallelGroupedLinear" in one["layers"]) == bool(experts)
    assert one["parameters_without_sharded_entry"] == [] and one["sharded_entries"] > 0
    assert one["hf_names_wrong_out"] == []
    # a rank reads every tensor's share, and of a mixture of experts only its own experts
    assert one["hf_names_read"] == one["hf_names"] if not experts else one["hf_names_read"] < one["hf_names"]
    cut = one["layout"]["tensor"]
    if not experts:  # norms are not cut
        assert one["whole_model"] / cut < one["parameters"] < 1.001 * one["whole_model"] / cut


@needs_engine
@pytest.mark.parametrize("kind", THIN)
def test_weights_come_out_of_the_layers_as_they_went_in(built: dict[str, Any], kind: str) -> None:
    one = built["thin"][kind]
    assert "error" not in one, one["error"]
    assert one["wrong"] == [] and one["tensors"] == TENSORS[kind]


@needs_engine
@pytest.mark.parametrize("kind", THIN)
def test_the_optimizer_is_the_engines(built: dict[str, Any], kind: str) -> None:
    one = built["optimizers"][kind]
    assert "error" not in one, one["error"]
    assert one["adam"] == ["transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"]
    assert one["main_gradients"] and one["masters"] > 0
    assert one["sharded_states"] >= 3 * one["weights"] > 0  # master and two moments of each


@pytest.mark.parametrize("rank", [0, WORLD - 1])
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("fixture", ["built_local", pytest.param("built", marks=needs_engine)])
def test_the_optimizer_of_a_shipped_size_has_a_state_for_each_weight(
    request: pytest.FixtureRequest, size: str, rank: int, fixture: str
) -> None:
    """At the real shape and the YAML's layout; a load asks for no more than the rank's share of the model."""
    one = request.getfixturevalue(fixture)["optimizer_shapes"][f"{size} rank {rank}"]
    assert "error" not in one, one["error"]
    assert one["adam"] == ["FusedAdam" if HAS_ENGINE else "AdamW"]  # whatever the layers are
    assert one["real_memory"] == 0
    assert one["sharded_states"] == 3 * one["weights"] > 0  # master and two moments of each
    assert one["state_elements"] == 3 * one["elements"]
    assert 3 * one["masters"] <= one["read"] <= one["state_elements"]
    if not one["experts"]:  # their shares are of another group of ranks
        assert 0.98 * one["elements"] <= one["masters"] * one["ranks_of_dense"] <= 1.02 * one["elements"]


@pytest.mark.parametrize("implementation", ["local", pytest.param("transformer_engine", marks=needs_engine)])
@pytest.mark.parametrize("name", [name for name in config_names() if not name.endswith("cpu")])
def test_megatron_core_accepts_every_yamls_configuration(name: str, implementation: Any) -> None:
    """Its own checks of a TransformerConfig, as on a GPU."""
    settings = load(name).settings
    model = known_model(settings.rollout.model.model_path)
    assert model is not None
    config = transformer_config(model, settings.actor.model, implementation, "cuda")
    assert config.gradient_accumulation_fusion == (implementation == "transformer_engine")
    assert config.moe_permute_fusion == (model.is_moe and implementation == "transformer_engine")


def test_a_missing_engine_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """On CUDA without a working TransformerEngine: local layers for `auto`, an error for `transformer_engine`."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"TransformerEngine is not installed: .*--transformer-engine"):
        assert choose_implementation("auto", "cuda") == "local"
    with pytest.raises(ValueError, match=r"TransformerEngine is not installed; set it to auto or local"):
        choose_implementation("transformer_engine", "cuda")
    assert choose_implementation("local", "cuda") == "local"
    monkeypatch.undo()

    # half installed: the front is there, its extension for torch is not
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    (tmp_path / "transformer_engine" / "pytorch.py").write_text("raise OSError('libcublas.so.13: no such file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    try:
        with pytest.warns(UserWarning, match=r"does not import \(OSError: libcublas.so.13"):
            assert choose_implementation("auto", "cuda") == "local"
    finally:
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            sys.modules.pop(name, None)
    assert choose_implementation("auto", "cpu") == "local"
