"""Training of a reward model on comparisons through the Megatron actor, in the loop of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rstar2_megatron.algorithm.batch import TrainBatch
from rstar2_megatron.algorithm.preference import Comparison, Pairs
from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.cluster.tokens import put_sequences
from rstar2_megatron.settings.schema import SFTPhaseSettings
from rstar2_megatron.sft.training import Metrics, run_steps

PreferenceBatch = tuple[TrainBatch, Pairs]
"""Prefixes, whose tokens are in the object store, and which of them are compared."""


def put_comparisons(comparisons: Sequence[Comparison]) -> PreferenceBatch:
    prefixes = [sequence for comparison in comparisons for sequence in comparison.sequences()]
    return put_sequences(prefixes), Pairs.of(comparisons)


def run_preference_phase(
    actor: WorkerGroup,
    phase: SFTPhaseSettings,
    rows: Sequence[Comparison],
    seed: int,
    timeout_s: float,
    *,
    start: int = 0,
    pauses: Sequence[int] = (),
    after: Callable[[int, list[Metrics]], None] = lambda done, steps: None,
) -> list[Metrics]:
    """As `run_sft_phase`, on comparisons."""

    def put(indices: list[int]) -> PreferenceBatch:
        return put_comparisons([rows[i] for i in indices])

    def train(chunk: list[PreferenceBatch], lrs: list[float]) -> list[Metrics]:
        return list(actor.call("preference_steps", chunk, lrs, timeout_s=timeout_s)[0])

    return run_steps(phase, len(rows), seed, put, train, start=start, pauses=pauses, after=after)


def validate_preferences(actor: WorkerGroup, rows: Sequence[Comparison], batch_size: int, timeout_s: float) -> Metrics:
    """Loss, accuracy (share of pairs in the right order) and margin of all rows under the current weights."""
    totals: Metrics = {}
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        found = actor.call("preference_validation", *put_comparisons(part), timeout_s=timeout_s)[0]
        for name, value in found.items():  # a mean over the comparisons of the part
            totals[name] = totals.get(name, 0.0) + value * len(part) / len(rows)
    return totals
