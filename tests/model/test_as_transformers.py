"""A model directory is read as transformers reads it: the same files, the same values of config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rstar2_megatron.actor.hf_weights import HFReader
from rstar2_megatron.model.config_json import DEFAULTS
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.model.weight_files import model_tensors, weight_problems
from tests.actor.tiny import write_model

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def shard(directory: Path, folder: str = "") -> None:
    """Two shards and an index in place of the one file."""
    content = load_file(directory / SINGLE)
    file_of = {name: f"{folder}model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(sorted(content))}
    for file in sorted(set(file_of.values())):
        (directory / file).parent.mkdir(exist_ok=True)
        save_file({name: content[name] for name in content if file_of[name] == file}, directory / file, {"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    (directory / SINGLE).unlink()


def other(directory: Path, name: str) -> None:
    content = load_file(directory / SINGLE)
    save_file({name: tensor + 1 for name, tensor in content.items()}, directory / name, {"format": "pt"})


def pickled(directory: Path, name: str = "pytorch_model.bin") -> None:
    torch.save({name: tensor + 2 for name, tensor in load_file(directory / SINGLE).items()}, directory / name)


def with_extra(directory: Path) -> None:
    content = load_file(directory / SINGLE) | {"v_head.weight": torch.ones(1, 4)}
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(content, directory / SINGLE, {"format": "pt"})


def mixed_precision(directory: Path) -> None:
    content = load_file(directory / SINGLE)
    save_file(
        {name: tensor.bfloat16() if tensor.ndim > 1 else tensor for name, tensor in content.items()},
        directory / SINGLE,
        {"format": "pt"},
    )


def shards_beside_a_consolidated_file(directory: Path) -> None:
    other(directory, "consolidated.safetensors")
    shard(directory)


LOADED: dict[str, Callable[[Path], object]] = {
    "one file": lambda directory: None,
    "shards": shard,
    "shards in a folder": lambda directory: shard(directory, "shards/"),
    "a backup": lambda directory: other(directory, "old-backup.safetensors"),
    "a variant": lambda directory: other(directory, "model.fp16.safetensors"),
    "a file before it by name": lambda directory: other(directory, "a.safetensors"),
    "a consolidated file": shards_beside_a_consolidated_file,
    "pickles": pickled,
    "tensors of no place": with_extra,
    "two precisions": mixed_precision,
}


@pytest.mark.parametrize("name", LOADED)
def test_the_same_weights(name: str, model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    LOADED[name](directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    reader = HFReader(directory)
    assert list(weight_problems(directory, ModelConfig.from_directory(directory))) == []
    for tensor in theirs:
        assert torch.equal(reader.read(tensor, "whole", 0, 1).float(), theirs[tensor]), tensor


def rename(directory: Path, name: str) -> None:
    (directory / SINGLE).rename(directory / name)


def lose_index(directory: Path) -> None:
    shard(directory)
    (directory / INDEX).unlink()


def lose_shard(directory: Path) -> None:
    shard(directory)
    next(directory.glob("model-*")).unlink()


def truncate(directory: Path) -> None:
    (directory / SINGLE).write_bytes((directory / SINGLE).read_bytes()[:-8])


def widen(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 8}))


UNLOADED: dict[str, Callable[[Path], object]] = {
    "another name": lambda directory: rename(directory, "weights.safetensors"),
    "a variant alone": lambda directory: rename(directory, "model.fp16.safetensors"),
    "no index": lose_index,
    "no shard": lose_shard,
    "a truncated file": truncate,
    "an empty file": lambda directory: (directory / SINGLE).write_bytes(b""),
    "a larger vocabulary": widen,
}


@pytest.mark.parametrize("name", UNLOADED)
def test_what_transformers_refuses_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    UNLOADED[name](directory)
    with pytest.raises(Exception):  # noqa: B017
        AutoModelForCausalLM.from_pretrained(directory)
    assert len(list(weight_problems(directory, ModelConfig.from_directory(directory)))) == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "moe", "llama", "mistral"])
def test_the_same_tensors(kind: str, tied: bool, tmp_path: Path) -> None:
    """Names and shapes that a config.json asks for are those that transformers writes."""
    kinds: dict[str, dict[str, Any]] = {
        "qwen2": {},
        "qwen3": {"qwen3": True},
        "moe": {"experts": {}},
        "llama": {"llama": {"rope_type": "default", "rope_theta": 1e4}},
        "mistral": {"mistral": True},
    }
    write_model(tmp_path, tie=tied, num_hidden_layers=2, **kinds[kind])
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / SINGLE).items()}
    assert model_tensors(ModelConfig.from_directory(tmp_path)) == stored


WHOLE: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
FORMS: list[dict[str, Any]] = [
    {},
    {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    {"rope_scaling": {"type": "default"}, "rope_parameters": {**LLAMA3, "rope_theta": 2e6}},
    {"rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 2e6}},
    {"rope_scaling": {"factor": 4.0}},
    {"num_key_value_heads": "null"},
    {"head_dim": "null"},
    {"num_local_experts": 32, "num_experts": None},
    *({key: None} for key in WHOLE if key not in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")),
]


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_the_same_values(architecture: str, tmp_path: Path) -> None:
    """Of every form of config.json; what transformers or we refuse, nobody misreads."""
    compared = 0
    for form in FORMS:
        raw = {**WHOLE, **form, "architectures": [architecture], "model_type": DEFAULTS[architecture]["model_type"]}
        raw = {key: value for key, value in raw.items() if value is not None or key == "sliding_window" not in form}
        raw = {key: None if value == "null" else value for key, value in raw.items()}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        try:
            ours = ModelConfig.from_directory(tmp_path)
        except ValueError:
            assert form.keys() & {"head_dim", "num_attention_heads", "sliding_window"}, form
            continue
        try:
            theirs = AutoConfig.from_pretrained(tmp_path)
        except Exception:
            assert "null" in form.values(), form
            continue
        rope = theirs.rope_parameters
        compared += 1
        assert ours.num_kv_heads == theirs.num_key_value_heads, form
        heads = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
        assert heads in (ours.head_dim, None), form  # None: no model of transformers can be made of it
        assert ours.rope_theta == rope["rope_theta"] and ours.rms_norm_eps == theirs.rms_norm_eps, form
        assert ours.max_position_embeddings == theirs.max_position_embeddings, form
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings, form
        assert (ours.rope_scaling is None) == (rope["rope_type"] == "default"), form
        assert ours.rope_scaling is None or ours.rope_scaling.factor == rope["factor"], form
        if ours.is_moe:
            assert (ours.num_experts, ours.experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok), form
            assert ours.expert_intermediate_size == theirs.moe_intermediate_size, form
            assert ours.norm_topk_prob == theirs.norm_topk_prob, form
    assert compared >= len(FORMS) - 4
