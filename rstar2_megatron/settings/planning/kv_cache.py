"""KV cache of an engine, in tokens.

A token takes 2 x layers x KV heads x head size x bytes; capacity = (free memory x share x TP - weights) / bytes a token.
SGLang applies its share to the memory that is free at its start; an actor on the same GPU reduces it.
"""

from __future__ import annotations

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.memory import GB, WIDTH
from rstar2_megatron.settings.schema import Settings


def kv_bytes_per_token(model: ModelConfig, precision: str) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * WIDTH[precision]


def kv_capacity(settings: Settings, model: ModelConfig, free_gb: float | None) -> int:
    """Tokens of KV cache of one engine; negative when its weights do not fit. free_gb: free memory of each GPU at its start."""
    rollout = settings.rollout
    if free_gb is None:  # on a CPU the YAML must set the size
        return rollout.max_total_tokens or 0
    room = free_gb * GB * rollout.gpu_memory_utilization * rollout.tensor_parallel_size
    room -= WIDTH[rollout.model.precision] * model.num_parameters
    capacity = int(room // kv_bytes_per_token(model, rollout.model.precision))
    return min(capacity, rollout.max_total_tokens or capacity)
