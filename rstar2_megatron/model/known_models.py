"""Shapes of public models, for plans before the model is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rstar2_megatron.model.config_json import DEFAULTS
from rstar2_megatron.model.model_config import ModelConfig

# name: (hidden, MLP width, layers, heads, KV heads, vocabulary, tied embeddings)
_QWEN25 = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
}
_QWEN3 = {
    "0.6b": (1024, 3072, 28, 16, 8, 151936, True),
    "1.7b": (2048, 6144, 28, 16, 8, 151936, True),
    "4b": (2560, 9728, 36, 32, 8, 151936, True),
    "8b": (4096, 12288, 36, 32, 8, 151936, False),
    "14b": (5120, 17408, 40, 40, 8, 151936, False),
    "32b": (5120, 25600, 64, 64, 8, 151936, False),
}
_LLAMA3 = {
    "1b": (2048, 8192, 16, 32, 8, 128256, True),
    "3b": (3072, 8192, 28, 24, 8, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
    "70b": (8192, 28672, 80, 64, 8, 128256, False),
}
_SMOLLM2 = {
    "135m": (576, 1536, 30, 9, 3, 49152, True),
    "360m": (960, 2560, 32, 15, 5, 49152, True),
    "1.7b": (2048, 8192, 24, 32, 32, 49152, True),
}
# name: (hidden, dense width, layers, heads, KV heads, vocabulary, tied embeddings, expert width)
_QWEN3_MOE = {"30b": (2048, 6144, 48, 32, 4, 151936, False, 768), "235b": (4096, 12288, 94, 64, 4, 151936, False, 1536)}
_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings", "moe_intermediate_size",
)  # fmt: skip
_QWEN3_KEYS = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6}
_MOE_KEYS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_LLAMA_KEYS = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "max_position_embeddings": 131072}
_LLAMA_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# (words of the name, sizes, other keys of config.json); the first that fits counts
_FAMILIES: tuple[tuple[str, dict[str, tuple[Any, ...]], dict[str, Any]], ...] = (
    ("qwen3 a*b", _QWEN3_MOE, _QWEN3_KEYS | _MOE_KEYS),
    ("qwen3", _QWEN3, _QWEN3_KEYS),
    ("qwen2.5", _QWEN25, {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_theta": 1e6}),
    ("llama 3.1", _LLAMA3, _LLAMA_KEYS | {"rope_scaling": {**_LLAMA_SCALING, "factor": 8.0}}),
    ("llama 3.2", _LLAMA3, _LLAMA_KEYS | {"rope_scaling": {**_LLAMA_SCALING, "factor": 32.0}}),
    ("smollm2", _SMOLLM2, _LLAMA_KEYS | {"rope_theta": 1e5, "max_position_embeddings": 8192}),
)


def known_config(model_path: str) -> dict[str, Any] | None:
    """The config.json of a model by its directory's name, e.g. Qwen2.5-7B-Instruct, Llama-3.2-1B; None when unknown."""
    words = {re.sub(r"^a\d+b$", "a*b", word) for word in re.split("[-_]", Path(model_path).name.lower())}
    for family, sizes, keys in _FAMILIES:
        if words >= set(family.split()):
            shape = next((shape for size, shape in sizes.items() if size in words), None)
            kind = {"model_type": DEFAULTS[keys["architectures"][0]]["model_type"]}
            return None if shape is None else dict(zip(_NAMES, shape)) | keys | kind
    return None


def known_model(model_path: str) -> ModelConfig | None:
    """The shape of a model by its directory's name; None when unknown."""
    config = known_config(model_path)
    return None if config is None else ModelConfig.from_dict(config, where=model_path)
