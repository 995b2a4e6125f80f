"""KL(policy || reference) per token, estimated from the log-probs of the token that was sampled.

Names are RLinf's (`algorithm.kl_penalty_type`) and Schulman's (joschu.net/blog/kl-approx.html), with
d = log p_reference - log p_policy:
- low_var_kl, k3: exp(d) - d - 1; its value is unbiased and never negative (the usual KL loss of GRPO);
- mse, k2: d^2 / 2; its value is biased, its on-policy gradient is that of the KL.
kl (k1 = -d) and abs are no loss terms, and `runs.preflight` refuses them: the expected on-policy gradient of k1 is zero.
"""

from __future__ import annotations

from torch import Tensor

from rstar2_megatron.algorithm.loss import MAX_LOG_RATIO


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: str, clamp: float | None = None) -> Tensor:
    """The estimate for each token, in the shape of `logprobs`, with gradient.

    clamp: largest value of low_var_kl; a token above it has no gradient, as in the public codes.
    """
    difference = (reference_logprobs.detach() - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    assert kind in ("low_var_kl", "k3"), kind
    estimate = difference.exp() - difference - 1.0
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)
