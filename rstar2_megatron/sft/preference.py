"""Training of a reward model on comparisons through the Megatron actor, in the loop of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

from rstar2_megatron.algorithm.batch import TrainBatch
from rstar2_megatron.algorithm.preference import Comparison, Pairs
from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.cluster.tokens import put_sequences
from rstar2_megatron.sft.training import Metrics


def put_comparisons(comparisons: Sequence[Comparison]) -> tuple[TrainBatch, Pairs]:
    """Prefixes, whose tokens are in the object store, and which of them are compared."""
    prefixes = [sequence for comparison in comparisons for sequence in comparison.sequences()]
    return put_sequences(prefixes), Pairs.of(comparisons)


def validate_preferences(actor: WorkerGroup, rows: Sequence[Comparison], batch_size: int, timeout_s: float) -> Metrics:
    """Loss, accuracy (share of pairs in the right order) and margin of all rows under the current weights."""
    totals: Metrics = {}
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        found = actor.call("preference_validation", *put_comparisons(part), timeout_s=timeout_s)[0]
        for name, value in found.items():  # a mean over the comparisons of the part
            totals[name] = totals.get(name, 0.0) + value * len(part) / len(rows)
    return totals
