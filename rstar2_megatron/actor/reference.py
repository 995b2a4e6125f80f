"""The reference policy of the KL term: the weights at the start of RL, kept on the host and swapped in to score a batch.

There is no second model on the device. Scoring copies this rank's weights to the host and back once a step. It works under
every layout, because each rank swaps the weights that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rstar2_megatron.actor.policy import Policy


class FrozenReference:
    """A copy of this rank's weights, taken at construction; collective like `Policy`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        policy.finish_gather()
        self._weights = [_to_host(p) for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p.data for chunk in self._policy.chunks for p in chunk.parameters()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the context the policy has the reference weights; afterwards its own are restored bit by bit."""
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
