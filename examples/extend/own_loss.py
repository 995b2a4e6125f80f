"""An advantage and a policy loss of one's own, in a few lines of torch.

The advantage gives problems that are seldom solved more weight. The loss clips the ratio of a whole trajectory, the geometric
mean of its tokens' ratios, in place of the ratio of each token.
"""

import torch
from torch import Tensor

from rstar2_megatron.algorithm.loss import Tokens


def seldom_solved(rewards: Tensor, valid: Tensor) -> Tensor:
    """rewards, valid [groups, G] -> advantages [groups, G]: (r - mean) / sqrt(mean)."""
    mean = (rewards * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
    return (rewards - mean) / mean.clamp(min=0.05).sqrt()


def of_trajectories(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token [n]; `clipped` [n] is its share in `actor/clip_fraction`."""
    log_ratio = tokens.sequence_sum(tokens.logprobs - tokens.old_logprobs)
    length = tokens.sequence_sum(torch.ones_like(tokens.logprobs))
    ratio = (log_ratio / length.clamp(min=1)).exp()[tokens.sequence]
    bounded = ratio.clamp(1 - tokens.settings.clip_ratio_low, 1 + tokens.settings.clip_ratio_high)
    free, cut = -tokens.advantages * ratio, -tokens.advantages * bounded
    return torch.maximum(free, cut), {"clipped": cut > free, "trajectory_ratio": ratio}
