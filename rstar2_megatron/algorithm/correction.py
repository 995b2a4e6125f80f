"""Truncated importance sampling between engine and actor.

Engine and actor compute slightly different log-probs for the same tokens and weights. When the policy ratio uses the actor's
own old log-probs, each token is weighted by the remaining factor `actor_old / engine`, truncated from above.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rstar2_megatron.algorithm.loss import MAX_LOG_RATIO


def tis_weights(
    actor_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights `min(exp(actor - rollout), clip)` `[tokens]`, 1 where nothing is trained, without gradient.

    Returns the weights and detached metrics over the trained tokens. Sums: `tis_ratio`, `tis_clipped` (tokens above the
    clip), `logprob_diff` (|actor - rollout|), `rollout_kl` (k3 estimate of KL(engine || actor), never negative). Maxima,
    to be reduced by max: `tis_ratio_max`, `logprob_diff_max`.
    """
    if not clip > 0:
        raise ValueError(f"importance_sampling_clip must be positive, got {clip}")
    with torch.no_grad():
        trained = mask.bool()
        zero = actor_logprobs.new_zeros(())
        diff = torch.where(trained, actor_logprobs - rollout_logprobs, zero)
        ratio = diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        metrics = {
            "tis_ratio": torch.where(trained, ratio, zero).sum().float(),
            "tis_clipped": (trained & (ratio > clip)).sum().float(),
            "logprob_diff": diff.abs().sum().float(),
            "rollout_kl": (ratio - 1.0 - diff).sum().float(),
            "tis_ratio_max": ratio[trained].max().float() if trained.any() else zero.float(),
            "logprob_diff_max": diff.abs().max().float() if diff.numel() else zero.float(),
        }
        return torch.where(trained, ratio.clamp(max=clip), torch.ones_like(ratio)), metrics
