"""How many tokens of KV cache an engine has room for.

2 x layers x KV heads x head size x bytes a token; capacity = (free memory x share x TP - weights) / that. SGLang takes its
share of what is free when it starts, and there is less of it beside an actor.
"""

from __future__ import annotations

from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.planning.memory import GB
from rstar2_megatron.settings.schema import Settings


def kv_bytes_per_token(model: ModelConfig, precision: str) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * (2 if precision == "bf16" else 4)


def kv_capacity(settings: Settings, model: ModelConfig, free_gb: float | None) -> int:
    """Tokens of KV cache of one engine; negative when its weights do not fit. free_gb: of each GPU at its start."""
    rollout = settings.rollout
    width = 2 if rollout.model.precision == "bf16" else 4
    if free_gb is None:  # on CPU SGLang must be told
        return rollout.max_total_tokens or 0
    room = free_gb * GB * rollout.gpu_memory_utilization * rollout.tensor_parallel_size
    room -= width * model.num_parameters
    capacity = int(room // kv_bytes_per_token(model, rollout.model.precision))
    return min(capacity, rollout.max_total_tokens or capacity)
