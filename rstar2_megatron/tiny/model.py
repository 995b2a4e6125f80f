"""A Qwen2 model small enough to train on two CPU cores, initialised so that it soon learns to copy.

Copying a number needs an induction head: it finds the earlier place of the digits just written, and copies the next one.
An induction head needs a layer that tells every position which token precedes it. From random weights that layer takes
longest to form. Qwen2's query and key biases can form it from the start: with constant queries and keys,
rotary embedding leaves attention scores that depend on distance alone, here highest at distance 1, 2, 3 and 4 for
the four heads of the first layer. Nothing else is set by hand, and every weight stays trainable.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rstar2_megatron.tiny.recipe import TinyModelShape


def build_model(shape: TinyModelShape, vocab_size: int, eos_id: int, pad_id: int, seed: int) -> Qwen2ForCausalLM:
    """A fresh fp32 model; the vocabulary is padded to a multiple of 64. Deterministic under `seed`."""
    config = Qwen2Config(
        vocab_size=math.ceil(vocab_size / 64) * 64,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        bos_token_id=pad_id,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    if shape.previous_token_score:
        _look_back(model, shape)
    return model


@torch.no_grad()
def _look_back(model: Qwen2ForCausalLM, shape: TinyModelShape) -> None:
    """Point head h of the first layer at the token h + 1 positions before."""
    size = shape.hidden_size // shape.num_heads
    heads_per_kv = shape.num_heads // shape.num_kv_heads
    attention = model.model.layers[0].self_attn
    # one component for each rotary frequency; q.k / sqrt(size) then peaks at previous_token_score
    constant = torch.zeros(size)
    constant[: size // 2] = math.sqrt(shape.previous_token_score * math.sqrt(size) / (size // 2))
    attention.q_proj.weight.mul_(0.1)
    attention.k_proj.weight.mul_(0.1)
    for head in range(shape.num_heads):
        kv = head // heads_per_kv
        attention.k_proj.bias[kv * size : (kv + 1) * size] = constant
        query = _rotate(constant, -(head + 1), shape.rope_theta)
        attention.q_proj.bias[head * size : (head + 1) * size] = query


def _rotate(vector: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of `vector` [head size] at `position`, halves paired as Qwen2 pairs them."""
    half = vector.shape[0] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def save_model(model: Qwen2ForCausalLM, directory: Path) -> None:
    """Write config.json and model.safetensors."""
    logging.disable_progress_bar()  # a bar for one file of 6 MB
    model.save_pretrained(directory)
    logging.enable_progress_bar()
    shutil.copymode(directory / "config.json", directory / "model.safetensors")  # which safetensors gives to its owner alone
