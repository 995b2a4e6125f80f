"""An actor whose engines get other weights than it trains: Gaussian noise on every matrix, drawn anew for each weight sync.

The size is that of the mean |log-prob of the engine - log-prob of the actor| of a trained token, taken from the environment.
The noise follows it: after each step its scale is multiplied by what was wanted over what the step has measured. The weights
of the start are exact, because the checks before the first update compare them, and so are those after the last step, so that
the last evaluation is of the policy that was trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from rstar2_megatron.algorithm.batch import TrainBatch
from rstar2_megatron.cluster.actor_worker import ActorWorker
from rstar2_megatron.cluster.weights import Sent
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.weights.route import WeightRoute

SIZE = "BENCHMARK_ENGINE_NOISE"  # nats
_FIRST_SCALE = 0.1  # of a matrix's standard deviation, for 1 nat
_MOST = 2.0  # times that one step may change the scale


class NoisyActor(ActorWorker):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._size = float(os.environ[SIZE])
        self._scale = _FIRST_SCALE * self._size
        self._trained = self._noisy = 0
        self._random = torch.Generator().manual_seed(settings.actor.seed)

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = super().train_step(batch)
        self._trained += 1
        measured = metrics.get("actor/logprob_diff_mean", 0.0)
        if self._noisy and measured > 0:
            self._scale *= min(max(self._size / measured, 1 / _MOST), _MOST)
        metrics["actor/engine_noise_scale"] = self._scale
        return metrics

    def send_weights(self, route: WeightRoute, engines: list[Any]) -> Sent:
        named = self.actor.iter_hf_weights()
        if 0 < self._trained < self._settings.runner.max_steps:
            self._noisy += 1
            named = perturbed(named, self._scale, self._random)
        return self._sender.send(named, route, engines)


def perturbed(
    named: Iterator[tuple[str, torch.Tensor]], scale: float, random: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with noise of `scale` times a matrix's standard deviation. Vectors, as of norms, stay as they are."""
    for name, tensor in named:
        if tensor.ndim < 2:
            yield name, tensor
            continue
        noise = torch.randn(tensor.shape, generator=random).to(tensor.device)
        yield name, (tensor.float() + scale * tensor.float().std() * noise).to(tensor.dtype)
