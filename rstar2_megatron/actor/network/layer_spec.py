"""The layer spec: the modules of a transformer layer, our own or TransformerEngine's."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_num_layers_to_build
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rstar2_megatron.actor.network.attention import PackedAttention
from rstar2_megatron.actor.network.norm import RMSNorm

Implementation = Literal["local", "transformer_engine"]


def choose_implementation(wanted: str, device: str) -> Implementation:
    """Resolve `actor.model.transformer_impl`. Raises ValueError when it asks for a TransformerEngine that cannot be used."""
    if wanted == "local" or (wanted == "auto" and not (device == "cuda" and torch.cuda.is_available())):
        return "local"
    missing = _why_no_engine(device)
    if missing is None:
        return "transformer_engine"
    if wanted == "transformer_engine":
        raise ValueError(
            f"actor.model.transformer_impl=transformer_engine, but TransformerEngine is {missing}; "
            "set it to auto or local, or bash scripts/setup_env.sh --transformer-engine"
        )
    warnings.warn(
        f"TransformerEngine is {missing}: training with megatron-core's local layers, which are slower "
        "(bash scripts/setup_env.sh --transformer-engine installs it)",
        stacklevel=2,
    )
    return "local"


def _why_no_engine(device: str) -> str | None:
    """Why TransformerEngine cannot be used, or None. Its torch extension is built separately, so the import is tried."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "not installed"
    if device != "cuda" or not torch.cuda.is_available():
        return "installed without a CUDA device"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # OSError for a missing library or symbol; a missing extension can raise anything
        return f"installed, but does not import ({type(error).__name__}: {error})"
    return None


def block_spec(config: TransformerConfig, implementation: Implementation, vp_stage: int | None) -> Any:
    """Spec of this pipeline stage's layers and final norm."""
    if implementation == "transformer_engine":
        # Imported here, because it needs TransformerEngine.
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    parts = layer.submodules
    if config.num_moe_experts:  # as TransformerEngine's layers name their weights in a checkpoint
        parts.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
