"""The keys of a config.json: what transformers takes for missing ones, and values from which no model can be built."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

AGAIN = "copy the file again from where the model came"
TAKE = "take the config.json of these weights"
# by supported architecture: what transformers takes where a key is missing
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"model_type": "qwen2", "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_key_value_heads": 32, "head_dim": 128},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "LlamaForCausalLM": {"model_type": "llama", "max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}
_NEEDED = "num_attention_heads vocab_size hidden_size intermediate_size num_hidden_layers"
_COUNTS = "num_key_value_heads head_dim max_position_embeddings num_local_experts decoder_sparse_step"
_EXPERTS = "num_experts num_experts_per_tok moe_intermediate_size"
_FLOAT_TYPES = ("float64", "float32", "float16", "bfloat16", "auto")
_SWITCHES = "tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob"
# by key, the values of models that the actor computes, the first of them where the key is missing
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
_OF_LLAMA: dict[str, tuple[Any, ...]] = {"attention_bias": (False, None), "mlp_bias": (False, None)}


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (f"{_NEEDED} {_EXPERTS} {_COUNTS}", lambda value: type(value) is int and value > 0, "a whole number from 1 on"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    ("rms_norm_eps", is_positive, "a number above 0"),
    ("dtype torch_dtype", _FLOAT_TYPES.__contains__, "float32, float16 or bfloat16"),
)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; {AGAIN}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a JSON object; {AGAIN}")
    return raw


def key_problems(raw: dict[str, Any], model_type: str) -> Iterator[str]:
    """What is wrong with the keys, defaults included. A problem takes it that those before it are not there.

    Sizes that do not fit each other do not fit the weights either: `weight_files.weight_problems` compares those.
    """
    needed = f"{_NEEDED} {_EXPERTS if model_type == 'qwen3_moe' else ''}".split()
    for keys, is_valid, expected in _KINDS:
        given = {key: raw.get(key) for key in keys.split() if key in needed or raw.get(key) is not None}
        if wrong := [f"{key}={value!r}" for key, value in given.items() if not is_valid(value)]:
            yield f"{', '.join(wrong)}, expected {expected}; copy the config.json again from where the model came"
    for key, values in (_COMPUTED | (_OF_LLAMA if model_type == "llama" else {})).items():
        if raw.get(key, values[0]) not in values:
            yield f"{key}={raw[key]!r} is not supported; supported: {values[0]}"
    if raw["model_type"] != model_type:
        yield f"model_type={raw['model_type']}, but architectures names a {model_type}; {TAKE}"
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            yield f"{key}: quantized weights cannot be trained; take the model in bfloat16"
    if file := raw.get("transformers_weights"):
        yield f"transformers_weights={file}, which engines do not read; name that file model.safetensors and remove the key"
    experts = raw.get("num_local_experts") or raw.get("num_experts")
    if model_type == "qwen3_moe" and raw["num_experts_per_tok"] > experts:
        yield f"num_experts_per_tok={raw['num_experts_per_tok']} of {experts} experts; {TAKE}"
    layers, kinds = raw["num_hidden_layers"], raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers == kinds.count("full_attention")):
        words = ", ".join(sorted(set(map(str, kinds)))) if isinstance(kinds, list) else repr(kinds)
        yield f"layer_types names {words}; supported: full_attention for each of num_hidden_layers={layers}"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = raw.get(key)
        for i in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not (type(i) is int and i < raw["vocab_size"]):
                yield f"{key}={i!r}, expected a token of vocab_size={raw['vocab_size']}; {TAKE}"
