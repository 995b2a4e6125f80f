"""What a transformer layer is made of: our modules, or TransformerEngine's on CUDA where installed."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_num_layers_to_build
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rstar2_megatron.actor.network.attention import PackedAttention
from rstar2_megatron.actor.network.norm import RMSNorm

Implementation = Literal["local", "transformer_engine"]


def choose_implementation(wanted: str, device: str) -> Implementation:
    """Resolve `actor.model.transformer_impl`. Raises ValueError when a wanted engine is absent."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and device == "cuda" and torch.cuda.is_available()
    if wanted == "auto":
        return "transformer_engine" if usable else "local"
    if wanted == "transformer_engine" and not usable:
        raise ValueError(
            f"actor.model.transformer_impl=transformer_engine, but TransformerEngine is "
            f"{'installed without a CUDA device' if installed else 'not installed'}; "
            "set it to auto or local, or install transformer-engine[pytorch]"
        )
    return "local" if wanted == "local" else "transformer_engine"


def block_spec(config: TransformerConfig, implementation: Implementation, vp_stage: int | None) -> Any:
    """Spec of this pipeline stage's layers and final norm."""
    if implementation == "transformer_engine":
        # Here, because it needs TransformerEngine.
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
