"""Weights go in from a Hugging Face directory and come out of it unchanged, under any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rstar2_megatron.actor import hf_weights
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.tokenizer_files import directory_problems
from rstar2_megatron.weights.checksum import tensor_checksum, weights_checksum
from tests.actor import reference
from tests.actor.programs import training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings
from tests.runs.inputs.models import CONFIG, write_directory

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {"virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    "ranks, model, optim, which",
    [
        (1, {}, {}, "qwen2"),
        (2, TP2, {}, "qwen3"),
        (2, {**PP2, **VP2}, {}, "qwen2-tied"),
        (2, {}, {"overlap_grad_reduce": True, "overlap_param_gather": True}, "qwen2"),
        (4, {**TP2, **PP2}, {}, "qwen2"),
        (4, {**TP2, **PP2}, {}, "llama-tied"),
        (2, TP2, {}, "mistral"),
        (4, {**PP2, "expert_model_parallel_size": 2}, {}, "moe-tied"),
    ],
)
def test_round_trip_is_bit_exact(
    pool: RankPool,
    models: dict[str, Path],
    tmp_path: Path,
    ranks: int,
    model: dict[str, Any],
    optim: dict[str, Any],
    which: str,
) -> None:
    source = load_file(models[which] / "model.safetensors")
    target = tmp_path / "export"
    config = settings(model=model, optim=optim)
    for weights in pool.run(training.round_trip, ranks, config, models[which], target):
        assert weights.keys() == source.keys()
        for name, tensor in weights.items():
            assert torch.equal(tensor, source[name]), name
    written = load_file(target / "model.safetensors")
    assert all(torch.equal(written[name], source[name]) for name in source)
    loaded = reference.load(target)
    sequence = sequences(1)[0]
    with torch.no_grad():
        mine, right = (reference.log_probs(m, sequence, 1.0) for m in (loaded, reference.load(models[which])))
    assert torch.equal(mine, right)
    assert not target.with_name("export.tmp").exists()


@pytest.mark.parametrize("ranks, model", [(2, {}), (4, {**PP2, **VP2})], ids=["DP2", "PP2 interleaved DP2"])
def test_an_overlapped_gather_is_over_before_weights_leave(
    pool: RankPool, models: dict[str, Path], ranks: int, model: dict[str, Any]
) -> None:
    """Every rank streams the weights of after the update, with `overlap_param_gather` as without."""
    batches = [sequences(6, seed=50 + i) for i in range(2)]
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    plain, overlapped = (
        pool.run(training.weights_after, ranks, settings(model=model, optim=o), models["qwen2-tied"], batches)
        for o in ({}, overlap)
    )
    assert all(sums == plain[0] for sums in [*plain, *overlapped])
    assert plain[0] != hf_checksums(models["qwen2-tied"])


def hf_checksums(directory: Path) -> dict[str, int]:
    return weights_checksum(load_file(directory / "model.safetensors").items())


def test_sharded_checkpoint_is_read_and_written(
    pool: RankPool, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load_file(models["qwen2"] / "model.safetensors")
    sharded = tmp_path / "sharded"
    monkeypatch.setattr(hf_weights, "MAX_SHARD_BYTES", 100_000)
    hf_weights.write_hf_directory(iter(source.items()), sharded, models["qwen2"], "float32", write=True)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert files == {f.name for f in sharded.glob("*.safetensors")}
    # who may read the configuration may read the weights: a model is served by another user, or shared by a group
    assert {f.stat().st_mode for f in sharded.iterdir()} == {(sharded / "config.json").stat().st_mode}
    assert sum(p.numel() for p in reference.load(sharded).parameters()) == sum(t.numel() for t in source.values())
    weights = pool.run(training.round_trip, 2, settings(model=TP2), sharded, tmp_path / "again")[0]
    assert all(torch.equal(weights[name], source[name]) for name in source)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 600}, {"eos_token_id": 600}, ([602, 600], [602, 600])),  # a base model's
        ({"eos_token_id": 602}, {"eos_token_id": [602, 600]}, (602, [602, 600])),  # an instruct model's stay
        ({"eos_token_id": [600, 602]}, {}, ([602, 600], [602])),
        ({"eos_token_id": None}, None, ([602], None)),
    ],
)
def test_an_exported_model_stops_where_its_turns_end(
    config: dict[str, Any], generation: dict[str, Any] | None, ends: tuple[Any, Any], tmp_path: Path
) -> None:
    source, target = write_directory(tmp_path / "source"), tmp_path / "target"
    (source / "config.json").write_text(json.dumps({**CONFIG, **config, "torch_dtype": "float16"}))
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps({"top_p": 0.8, **generation}))
    weights = load_file(source / "model.safetensors")
    hf_weights.write_hf_directory(iter(weights.items()), target, source, "bfloat16", write=True)
    written = json.loads((target / "config.json").read_text())
    assert (written["eos_token_id"], written["dtype"], written["torch_dtype"]) == (ends[0], "bfloat16", "bfloat16")
    if generation is not None:
        assert json.loads((target / "generation_config.json").read_text()) == {"top_p": 0.8, "eos_token_id": ends[1]}
    assert directory_problems(target, ModelConfig.from_directory(target), None) == []


def test_other_tokenizers_keep_their_ends(tmp_path: Path) -> None:
    """There a chat template decides how a turn ends."""
    source, target = write_directory(tmp_path / "source"), tmp_path / "target"
    (source / "tokenizer.json").write_text((source / "tokenizer.json").read_text().replace("<|im_end|>", "<|eot|>"))
    hf_weights.write_hf_directory(iter(load_file(source / "model.safetensors").items()), target, source, "float32", write=True)
    assert json.loads((target / "config.json").read_text()) == {**CONFIG, "dtype": "float32"}


def test_missing_tensor_names_it(models: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(models["qwen2"] / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    reader = hf_weights.HFReader(tmp_path)
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        reader.read("model.layers.2.mlp.up_proj.weight", "rows", 0, 2)


def test_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        hf_weights.HFReader(tmp_path)


def broken(source: Path, target: Path, change: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(source, target)
    save_file({**load_file(source / "model.safetensors"), **change}, target / "model.safetensors")
    return target


def test_each_rank_refuses_nan_and_infinity_in_what_it_reads(models: dict[str, Path], tmp_path: Path) -> None:
    """The checks before a start see only a part of a large model's values."""
    norm, head = "model.layers.3.input_layernorm.weight", "lm_head.weight"
    stored = load_file(models["qwen2"] / "model.safetensors")
    stored[norm][7] = float("nan")
    stored[head][-1, -1] = float("-inf")  # of the second rank
    reader = hf_weights.HFReader(broken(models["qwen2"], tmp_path / "model", {name: stored[name] for name in (norm, head)}))
    assert torch.equal(reader.read(head, "rows", 0, 2), stored[head][: len(stored[head]) // 2])
    for name, kind in ((head, "rows"), (norm, "whole")):
        with pytest.raises(
            ValueError, match=rf"/model\.safetensors: {name} holds NaN or infinity; .* take an earlier checkpoint"
        ):
            reader.read(name, kind, 1, 2)


def test_a_tensor_that_does_not_divide_as_config_says_is_refused(
    pool: RankPool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Each of two ranks would read half of its rows, the second one the wrong half."""
    head = load_file(models["qwen2"] / "model.safetensors")["lm_head.weight"]
    directory = broken(models["qwen2"], tmp_path / "longer", {"lm_head.weight": torch.cat([head, head[:1]])})
    with pytest.raises(RuntimeError, match=rf"ValueError: {directory}/model\.safetensors: lm_head\.weight has the shape"):
        pool.run(training.round_trip, 2, settings(model=TP2), directory, tmp_path / "out", timeout_s=120)
    pool.close()  # its ranks keep their process group


def test_checksum_notices_what_sums_do_not() -> None:
    tensor = torch.randn(7, 5)
    same = tensor.t().contiguous().t()  # other strides, same values
    assert tensor_checksum(tensor) == tensor_checksum(same)
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert tensor_checksum(swapped) != tensor_checksum(tensor)
    flipped = tensor.clone()
    flipped.view(torch.int32)[3, 3] ^= 1
    assert tensor_checksum(flipped) != tensor_checksum(tensor)
    assert tensor_checksum(tensor[:6]) != tensor_checksum(tensor)
    assert tensor_checksum(torch.zeros(4)) != tensor_checksum(torch.zeros(5))
    assert 0 <= tensor_checksum(tensor.bfloat16()) < 2**63
