"""Sampling from large vocabularies on a CPU: one uniform number a request instead of one exponential a word.

torch.multinomial draws an exponential for every word of every request, on one thread. For 64 requests and 49,152 words that
takes 80 ms, as long as a fifth of the forward pass of a model of 135M; the sum here takes 3 ms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sample(probs: Tensor) -> Tensor:
    """One word for each row of probs [B, V] (non-negative, any sum above 0) by the inverse distribution function: [B, 1].

    A word of probability 0 is never drawn. The sums are of the type of `probs`: in fp32 a probability is met to about 6e-8.
    """
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a uniform number may round up to the total
    drawn = torch.minimum(torch.rand_like(total) * total, below)
    return torch.searchsorted(cumulative, drawn, right=True)


def install() -> None:
    """Replace SGLang's sampling without top-k, top-p and seeds in this process; with them it stays SGLang's."""
    from sglang.srt.layers import sampler

    seeded = sampler.sampling_from_probs_torch

    def sampling_from_probs(probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if sampling_seed is not None:
            return seeded(probs, sampling_seed=sampling_seed, positions=positions)
        return sample(probs).view(-1).to(torch.int32)

    module: Any = sampler
    module.sampling_from_probs_torch = sampling_from_probs
