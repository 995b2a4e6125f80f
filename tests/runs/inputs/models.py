"""Model directories that only the checks before a start read: true headers, ones for weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 602,
}
SPECIAL = {"<|endoftext|>": 600, "<|im_start|>": 601, "<|im_end|>": 602}


def write_directory(directory: Path, *, shards: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """config.json, safetensors and a tokenizer's JSON, which fit each other."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    weights = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        for name, rows in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2)):
            shapes |= {f"self_attn.{name}_proj.weight": (rows, hidden), f"self_attn.{name}_proj.bias": (rows,)}
        weights |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    tensors = {name: torch.ones(shape, dtype=dtype) for name, shape in weights.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
    else:
        names = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
        for file in sorted(set(names.values())):
            save_file({n: t for n, t in tensors.items() if names[n] == file}, directory / file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": token, "special": True, **flags} for token, i in SPECIAL.items()]
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(600)}, "unk_token": "w0"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": added}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return directory
