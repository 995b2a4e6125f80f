"""Shapes of public models, for plans before the model is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# words of the name: (sizes, keys that differ from Qwen's)
_LLAMA: dict[tuple[str, ...], tuple[dict[str, tuple[Any, ...]], dict[str, Any]]] = {
    ("llama", "3.1"): (
        _LLAMA3,
        {"rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": {**_LLAMA3_SCALING, "factor": 8.0}},
    ),
    ("llama", "3.2"): (
        _LLAMA3,
        {"rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": {**_LLAMA3_SCALING, "factor": 32.0}},
    ),
    ("smollm2",): (_SMOLLM2, {"rope_theta": 1e5, "max_position_embeddings": 8192}),
}
# name: (hidden, expert width, layers, heads, KV heads, experts, experts a token, dense width)
_QWEN3_MOE = {"30b": (2048, 768, 48, 32, 4, 128, 8, 6144), "235b": (4096, 1536, 94, 64, 4, 128, 8, 12288)}


def known_model(model_path: str) -> ModelConfig | None:
    """The shape of a model by its directory's name, e.g. Qwen2.5-7B-Instruct, Llama-3.2-1B; None when unknown."""
    words = Path(model_path).name.lower().replace("_", "-").split("-")
    if "qwen3" in words and any(re.fullmatch(r"a\d+b", word) for word in words):
        for size, moe_shape in _QWEN3_MOE.items():
            if size in words:
                return ModelConfig.from_dict(_moe_config(moe_shape), where=model_path)
        return None
    for family, sizes in (("qwen2.5", _QWEN25), ("qwen3", _QWEN3)):
        if family not in words:
            continue
        for size, shape in sizes.items():
            if size in words:
                return ModelConfig.from_dict(_as_config(family, shape), where=model_path)
    for family_words, (sizes, keys) in _LLAMA.items():
        for size, shape in sizes.items():
            if {*family_words, size} <= set(words):
                raw = _as_config("llama", shape) | {"architectures": ["LlamaForCausalLM"], **keys}
                return ModelConfig.from_dict(raw, where=model_path)
    return None


def _as_config(family: str, shape: tuple[Any, ...]) -> dict[str, Any]:
    hidden, width, layers, heads, kv_heads, vocab, tied = shape
    qwen3 = family == "qwen3"
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if qwen3 else "Qwen2ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960 if qwen3 else 32768,
        "rope_theta": 1e6,
    }
    return config | ({"head_dim": 128} if qwen3 else {})


def _moe_config(shape: tuple[int, ...]) -> dict[str, Any]:
    hidden, expert_width, layers, heads, kv_heads, experts, chosen, width = shape
    return _as_config("qwen3", (hidden, width, layers, heads, kv_heads, 151936, False)) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": expert_width,
        "norm_topk_prob": True,
    }
