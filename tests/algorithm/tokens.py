"""Policy losses on tensors that a test writes down."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rstar2_megatron.algorithm.loss import POLICY_LOSSES, Tokens, policy_loss
from rstar2_megatron.settings.schema import AlgorithmSettings


def algorithm(**keys: Any) -> AlgorithmSettings:
    sampling = {"down_sampling_config": {"down_sample_to_n": 1}}
    required = {"group_size": 1, "down_sampling": sampling, "sampling_params": {"max_new_tokens": 1}}
    return AlgorithmSettings.model_validate({**required, **keys})


def clipped_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, entropy: Tensor | None = None, weights: Any = None, **keys: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The built-in loss of one micro-batch. weights: keyword arguments of `policy_loss`; keys: of `algorithm`."""
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=advantages,
        entropy=torch.zeros_like(old) if entropy is None else entropy,
        sequence=torch.zeros(len(logprobs), dtype=torch.long),
        position=torch.arange(len(logprobs)),
        num_sequences=1,
        settings=algorithm(**keys),
    )
    return policy_loss(tokens, POLICY_LOSSES["clipped"], **weights)
