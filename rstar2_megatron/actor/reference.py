"""The policy that RL started from, for the KL term: its weights on the host, swapped in to score a batch.

No second model: scoring under it costs one copy of this rank's weights to the device and one back a step, and
works under every layout, because what is swapped is what the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rstar2_megatron.actor.policy import Policy


class FrozenReference:
    """This rank's share of the policy's weights at the moment of construction; collective like `Policy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        policy.finish_gather()
        self._weights = [_to_host(p) for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p.data for chunk in self._policy.chunks for p in chunk.parameters()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy holds the reference weights inside, and its own again afterwards, bit by bit."""
        self._policy.finish_gather()
        own = [_to_host(p) for p in self._parameters()]
        try:
            self._copy(self._weights)
            yield
        finally:
            self._copy(own)

    @torch.no_grad()
    def _copy(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._parameters(), weights, strict=True):
            parameter.copy_(weight)


def _to_host(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", copy=True)
