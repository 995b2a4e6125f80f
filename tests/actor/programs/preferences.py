"""What the rank processes of the reward model's tests run: top-level functions, because they are pickled by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rstar2_megatron.actor.score_actor import ScoreActor
from rstar2_megatron.algorithm.preference import Comparison, Pairs


@contextmanager
def open_scorer(rank: int, world_size: int, init_method: str, config: Any, model_path: Any) -> Iterator[ScoreActor]:
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    actor = ScoreActor(*config, model_path=str(model_path), rank=rank, world_size=world_size, init_method=init_method)
    actor.initialize()
    try:
        yield actor
    finally:
        actor.close()


def step(actor: ScoreActor, batch: Sequence[Comparison], lr: float | None = None) -> dict[str, float]:
    return actor.preference_step([s for c in batch for s in c.sequences()], Pairs.of(batch), lr)


def train(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, batches: list[list[Comparison]], target: Path
) -> tuple[list[dict[str, float]], list[float], dict[str, float]]:
    """Metrics of a step on each batch; then the scores and the validation of the first one, and an export."""
    with open_scorer(rank, world_size, init_method, config, model_path) as actor:
        history = [step(actor, batch) for batch in batches]
        sequences = [s for c in batches[0] for s in c.sequences()]
        found = actor.policy.score(sequences, actor._plan(sequences), "last", temperature=1.0)
        scores = [float(values[-1]) for values in found.to_arrays()]
        validation = actor.preference_validation(sequences, Pairs.of(batches[0]))
        actor.export_hf(target)
        return history, scores, validation


def save_and_continue(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    directory: Path,
    batches: list[list[Comparison]],
) -> tuple[dict[str, int], dict[str, float]]:
    """A step, a checkpoint, another step: (checksums when saved, metrics of the second step)."""
    with open_scorer(rank, world_size, init_method, config, model_path) as actor:
        step(actor, batches[0])
        actor.save_checkpoint(directory)
        return actor.weights_checksum(), step(actor, batches[1])


def load_and_continue(
    rank: int, world_size: int, init_method: str, config: Any, model_path: Path, directory: Path, batch: list[Comparison]
) -> tuple[dict[str, int], dict[str, float]]:
    with open_scorer(rank, world_size, init_method, config, model_path) as actor:
        actor.load_checkpoint(directory)
        return actor.weights_checksum(), step(actor, batch)


class _LocalGroup:
    """The actor of this rank where `sft.preference` expects a worker group."""

    def __init__(self, actor: ScoreActor) -> None:
        self._actor = actor

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        if method == "preference_steps":
            chunk, lrs = args
            return [[self._actor.preference_step(*batch, lr) for batch, lr in zip(chunk, lrs, strict=True)]]
        return [getattr(self._actor, method)(*args)]


def run_phase(
    rank: int,
    world_size: int,
    init_method: str,
    config: Any,
    model_path: Path,
    rows: list[Comparison],
    phase: Any,
    checkpoint: Path,
    start: int,
) -> tuple[list[float], dict[str, float]]:
    """Losses of a phase from step `start`, with a checkpoint after step 2; the validation at its end."""
    from rstar2_megatron.sft import preference
    from rstar2_megatron.sft.training import run_sft_phase

    preference.put_sequences = list  # type: ignore[assignment]  # without Ray: this process trains on them itself
    with open_scorer(rank, world_size, init_method, config, model_path) as actor:
        if start:
            actor.load_checkpoint(checkpoint)

        def after(done: int, steps: list[dict[str, float]]) -> None:
            if done == 2 and not start:
                actor.save_checkpoint(checkpoint)

        group: Any = _LocalGroup(actor)
        how: Any = {"put": preference.put_comparisons, "method": "preference_steps"}  # those of runs/preference_run.py
        history = run_sft_phase(group, phase, rows, 5, 60.0, start=start, pauses=(2,), after=after, **how)
        found = preference.validate_preferences(group, rows, 4, 60.0)
        return [step["preference/loss"] for step in history], found
