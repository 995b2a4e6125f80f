"""Truncated importance sampling between engine and actor.

Engine and actor compute slightly different log-probs for the same tokens and weights. When the policy ratio uses the actor's
own old log-probs, each token is weighted by the remaining factor `actor_old / engine`, truncated from above.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rstar2_megatron.algorithm.loss import MAX_LOG_RATIO


def tis_weights(actor_logprobs: Tensor, rollout_logprobs: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights `min(exp(actor - rollout), clip)` of trained tokens `[tokens]`, without gradient.

    Returns the weights and detached metrics. Sums: `tis_ratio`, `tis_clipped` (tokens above the clip), `logprob_diff`
    (|actor - rollout|), `rollout_kl` (k3 estimate of KL(engine || actor), never negative). Maxima, to be reduced by max:
    `tis_ratio_max`, `logprob_diff_max`.
    """
    with torch.no_grad():
        diff = actor_logprobs - rollout_logprobs
        ratio = diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        zero = diff.new_zeros(())
        metrics = {
            "tis_ratio": ratio.sum().float(),
            "tis_clipped": (ratio > clip).sum().float(),
            "logprob_diff": diff.abs().sum().float(),
            "rollout_kl": (ratio - 1.0 - diff).sum().float(),
            "tis_ratio_max": (ratio.max() if len(ratio) else zero).float(),
            "logprob_diff_max": (diff.abs().max() if len(diff) else zero).float(),
        }
        return ratio.clamp(max=clip), metrics
