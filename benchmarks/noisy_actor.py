"""An actor whose engines get other weights than it trains: Gaussian noise on every matrix.

The noise is drawn anew for each weight sync, or once: then the engines are wrong in one direction, as by rounding. The size is
that of the mean |log-prob of the engine - log-prob of the actor| of a trained token, taken from the environment. The noise
follows it: after each step its scale is multiplied by the root of what was wanted over what was measured. The weights of the
start are exact, because the checks before the first update compare them, and so are those after the last step, so that the last
evaluation is of the policy that was trained.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from rstar2_megatron.algorithm.batch import TrainBatch
from rstar2_megatron.cluster.actor_worker import ActorWorker
from rstar2_megatron.cluster.weight_transfer import Sent
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.weights.route import WeightRoute

SIZE = "BENCHMARK_ENGINE_NOISE"  # nats
ONCE = "BENCHMARK_ENGINE_NOISE_ONCE"  # "1": the same noise at each sync
_NATS = 2.0  # for noise as large as the matrices; the difference grows with the square of the scale (tiny model)
_MOST = 1.15  # times that one step may change the scale


class NoisyActor(ActorWorker):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._size = float(os.environ[SIZE])
        self._scale = math.sqrt(self._size / _NATS)
        self._sent = 0  # before the first step, then after each
        self._random = torch.Generator().manual_seed(settings.actor.seed)

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        metrics: dict[str, float] = super().train_step(batch)
        # only the first rank has it, which on CPU sends the weights of all
        measured = metrics.get("actor/logprob_diff_mean", 0.0)
        if self._sent > 1 and measured > 0:
            self._scale *= min(max(math.sqrt(self._size / measured), 1 / _MOST), _MOST)
        metrics["actor/engine_noise_scale"] = self._scale
        return metrics

    def send_weights(self, route: WeightRoute, engines: list[Any]) -> Sent:
        named = self.actor.iter_hf_weights()
        if 0 < self._sent < self._settings.runner.max_steps:
            if os.environ.get(ONCE) == "1":
                self._random.manual_seed(self._settings.actor.seed)
            named = perturbed(named, self._scale, self._random)
        self._sent += 1
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
