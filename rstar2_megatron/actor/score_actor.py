"""The reward model under training: a MegatronActor with a score head, trained on comparisons of prefixes.

The prefixes of a comparison are always in one micro-batch, because their scores meet in the loss. Under context parallelism
the last tokens of prefixes are on different ranks, which exchange the scores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rstar2_megatron.actor.losses import LossFunction
from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.actor.packing import MicroBatchPlan
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.algorithm.preference import Pairs, check_room, pair_figures, preference_loss


class ScoreActor(MegatronActor):
    """As MegatronActor; the directory that it starts from is a policy's, whose head is left out, or a reward model's."""

    scores = True

    def preference_step(self, sequences: Sequence[TrainSequence], pairs: Pairs, lr: float | None = None) -> dict[str, float]:
        """One optimizer step on the comparisons `pairs` of the prefixes `sequences`; collective.

        lr: None uses the schedule's rate. Raises ValueError when a comparison does not fit a micro-batch.
        """
        started = time.monotonic()
        plan = self._plan_comparisons(sequences, pairs)
        step = self._update(sequences, plan, comparison_loss(pairs, len(sequences)), temperature=1.0, lr=lr)
        speed = self._speed(sequences, [plan], time.monotonic() - started)
        return preference_metrics(step, len(pairs.sizes), len(pairs.better), self.skipped_steps, speed)

    def preference_validation(self, sequences: Sequence[TrainSequence], pairs: Pairs) -> dict[str, float]:
        """Loss, share of pairs in the right order and margin under the current weights; collective, no update."""
        plan = self._plan_comparisons(sequences, pairs)
        loss = comparison_loss(pairs, len(sequences))
        sums = self.policy.measure(sequences, plan, loss, temperature=1.0)
        return {"loss": sums["loss"], "accuracy": sums["pair_accuracy"], "margin": sums["pair_margin"]}

    def _plan_comparisons(self, sequences: Sequence[TrainSequence], pairs: Pairs) -> MicroBatchPlan:
        """Micro-batches of whole comparisons."""
        ranges = pairs.ranges
        lengths = [sum(sequences[i].length for i in members) for members in ranges]
        check_room(max(lengths), self.runner.max_tokens_per_mbs * self.layout.context)
        plan = self._plan_lengths(lengths)
        own = [[[i for c in batch for i in ranges[c]] for batch in rank] for rank in plan.microbatches]
        return MicroBatchPlan(own, plan.tokens_per_rank)


def comparison_loss(pairs: Pairs, num_prefixes: int) -> LossFunction:
    """The loss of a batch of `num_prefixes` prefixes (`actor.losses`); a micro-batch must hold whole comparisons.

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
