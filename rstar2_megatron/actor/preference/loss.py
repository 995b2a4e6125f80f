"""The preference loss for the pipeline schedule, and the metrics of a step (see `actor.losses`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rstar2_megatron.actor.losses import LossFunction
from rstar2_megatron.algorithm.preference import Pairs, pair_figures, preference_loss


def comparison_loss(pairs: Pairs, num_prefixes: int) -> LossFunction:
    """The loss of a batch of `num_prefixes` prefixes; a micro-batch must hold whole comparisons.

    Needs Megatron's process groups.
    """
    # here, because on a CPU the stand-ins for CUDA must be installed before megatron-core is imported
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    better, worse = torch.tensor(pairs.better), torch.tensor(pairs.worse)
    weights = torch.tensor(pairs.weights, dtype=torch.float32)

    def loss(batch: Any, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """output fp32 [1, n]: the scores that this rank computed, of the sequences `batch.sequence`."""
        own = output.new_zeros(num_prefixes).index_put((batch.sequence.to(output.device),), output[0])
        scores = own
        if group.size() > 1:
            # The gradient of an own score is complete on this rank, because all pairs are here.
            everyones = own.detach().clone()
            dist.all_reduce(everyones, group=group)
            scores = own + (everyones - own.detach())
        here = torch.isin(better, torch.tensor(batch.members, dtype=torch.long))
        chosen = [x[here].to(output.device) for x in (better, worse, weights)]
        value = preference_loss(scores, *chosen)
        counted = 1.0 if group.rank() == 0 else 0.0  # every context-parallel rank has all pairs
        sums = {"loss": value.detach(), **pair_figures(scores, *chosen)}
        return value, {name: total * counted for name, total in sums.items()}

    return loss


def preference_metrics(
    step: dict[str, float], comparisons: int, pairs: int, skipped: int, speed: dict[str, float]
) -> dict[str, float]:
    """Metrics of a preference step from its reduced sums; `speed` holds metrics named `actor/...`."""
    return {
        "preference/loss": step["loss"],
        "preference/accuracy": step["pair_accuracy"],
        "preference/margin": step["pair_margin"],
        "preference/grad_norm": step["grad_norm"],
        "preference/lr": step["lr"],
        "preference/comparisons": float(comparisons),
        "preference/pairs": float(pairs),
        "preference/skipped_steps": float(skipped),
        **{name.replace("actor/", "preference/", 1): value for name, value in speed.items()},
    }
