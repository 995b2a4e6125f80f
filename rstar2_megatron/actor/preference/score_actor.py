"""The reward model under training: a MegatronActor with a score head, trained on comparisons of prefixes.

The prefixes of a comparison are always in one micro-batch, because their scores meet in the loss. Under context parallelism
the last tokens of prefixes are on different ranks, which exchange the scores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.actor.packing import MicroBatchPlan
from rstar2_megatron.actor.preference.loss import comparison_loss, preference_metrics
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.algorithm.preference import Pairs, check_room


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
