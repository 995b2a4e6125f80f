"""Supervised fine-tuning through the Megatron actor: phases of packed sequences, loss on the marked tokens.

A row of the data is {"segments": [[text, trained], ...]}: the texts of a conversation in order, with 1 for what the
model is to learn to write. The same actor, packing and optimizer as in reinforcement learning are used.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.cluster.calls import Group as WorkerGroup
from rstar2_megatron.settings.schema import SFTPhaseSettings

# Steps sent to the actor in one call: a call costs about 10 ms, a tiny step not much more.
_STEPS_PER_CALL = 10


def load_sft_rows(path: Path, tokenizer: Any, max_length: int) -> list[TrainSequence]:
    """Tokenise the jsonl rows of `path`. Raises ValueError with file and line for a row that is not usable."""
    sequences = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                segments = json.loads(line)["segments"]
                ids: list[int] = []
                mask: list[int] = []
                for text, trained in segments:
                    piece = tokenizer.encode(text, add_special_tokens=False)
                    ids += piece
                    mask += [int(trained)] * len(piece)
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(
                    f'{path}:{number}: expected {{"segments": [[text, 0 or 1], ...]}}, got {line[:80]!r} ({e})'
                ) from e
            if not any(mask) or len(ids) < 2:
                raise ValueError(f"{path}:{number}: no token of this row is trained")
            mask[0] = 0  # nothing predicts the first token
            ids, mask = ids[:max_length], mask[:max_length]
            sequences.append(TrainSequence(ids, mask, [0.0] * len(ids), advantage=0.0))
    if not sequences:
        raise ValueError(f"{path}: no rows")
    return sequences


def learning_rate(phase: SFTPhaseSettings, step: int) -> float:
    """Learning rate of step 0 .. phase.steps-1: linear warm-up, then constant or cosine to min_lr_ratio."""
    warmup = min(1.0, (step + 1) / max(1, phase.warmup_steps))
    if phase.decay == "constant":
        return phase.lr * warmup
    cosine = 0.5 * (1 + math.cos(math.pi * step / max(1, phase.steps)))
    return phase.lr * warmup * max(phase.min_lr_ratio, cosine)


def batches(rows: list[TrainSequence], phase: SFTPhaseSettings, seed: int) -> Iterator[list[TrainSequence]]:
    """`phase.steps` batches; rows in file order, or shuffled anew each time through."""
    rng = random.Random(seed)
    order: list[int] = []
    for _ in range(phase.steps):
        batch: list[TrainSequence] = []
        while len(batch) < phase.batch_size:
            if not order:
                order = list(range(len(rows)))
                if phase.shuffle:
                    rng.shuffle(order)
                order.reverse()  # taken from the end
            batch.append(rows[order.pop()])
        yield batch


def run_phase(
    actor: WorkerGroup, phase: SFTPhaseSettings, tokenizer: Any, max_length: int, seed: int, timeout_s: float
) -> list[dict[str, float]]:
    """Train one phase; returns the metrics of each step. Shows a progress bar with the loss."""
    rows = load_sft_rows(Path(phase.data_path), tokenizer, max_length)
    actor.call("start_sft_phase", phase, timeout_s=timeout_s)
    history: list[dict[str, float]] = []
    stream = batches(rows, phase, seed)
    with tqdm(total=phase.steps, desc=f"sft {phase.name}", unit="step", leave=False, disable=None) as bar:
        while len(history) < phase.steps:
            count = min(_STEPS_PER_CALL, phase.steps - len(history))
            chunk = [next(stream) for _ in range(count)]
            lrs = [learning_rate(phase, len(history) + i) for i in range(count)]
            history += actor.call("sft_steps", chunk, lrs, timeout_s=timeout_s)[0]
            bar.update(count)
            bar.set_postfix(loss=f"{history[-1]['sft/loss']:.3f}")
    return history
