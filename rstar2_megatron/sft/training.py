"""Supervised fine-tuning through the Megatron actor: packed conversations, loss on the marked tokens.

The same actor, packing and optimizer as in reinforcement learning are used. `run_sft_phase` serves the tiny cold start
and the full SFT of a recipe (`runs/sft_run.py`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.cluster.tokens import put_sequences
from rstar2_megatron.settings.schema import SFTPhaseSettings, SFTSettings
from rstar2_megatron.sft.rows import SFTRows

# Steps sent to the actor in one call: a call costs about 10 ms, a tiny step not much more.
_STEPS_PER_CALL = 10

Metrics = dict[str, float]


def sft_phase_of(sft: SFTSettings, num_rows: int) -> SFTPhaseSettings:
    """The phase of `epochs` over `num_rows` rows; the last batch of an epoch may take rows of the next."""
    steps = math.ceil(sft.epochs * num_rows / sft.batch_size)
    if sft.max_steps is not None:
        steps = min(steps, sft.max_steps)
    warmup = math.ceil(sft.warmup_ratio * steps)
    same = sft.model_dump(include=set(SFTPhaseSettings.model_fields))  # batch size, learning rate and optimizer
    return SFTPhaseSettings(name="sft", data_path="", steps=steps, warmup_steps=warmup, decay=sft.lr_decay_style, **same)


def learning_rate(phase: SFTPhaseSettings, step: int) -> float:
    """Learning rate of step 0 .. phase.steps-1: linear warm-up, then constant, or a cosine or a line to min_lr_ratio."""
    warmup = min(1.0, (step + 1) / max(1, phase.warmup_steps))
    if phase.decay == "constant":
        return phase.lr * warmup
    done = step / max(1, phase.steps)
    share = 1 - done if phase.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return phase.lr * warmup * max(phase.min_lr_ratio, share)


def batches(num_rows: int, phase: SFTPhaseSettings, seed: int) -> Iterator[list[int]]:
    """Row numbers of `phase.steps` batches; in file order, or shuffled for each pass.

    The same arguments give the same batches, so a resumed run needs only its step number.
    """
    rng = random.Random(seed)
    order: list[int] = []
    for _ in range(phase.steps):
        batch: list[int] = []
        while len(batch) < phase.batch_size:
            if not order:
                order = list(range(num_rows))
                if phase.shuffle:
                    rng.shuffle(order)
                order.reverse()  # taken from the end
            batch.append(order.pop())
        yield batch


def run_sft_phase(
    actor: WorkerGroup,
    phase: SFTPhaseSettings,
    rows: Any,
    seed: int,
    timeout_s: float,
    *,
    start: int = 0,
    pauses: Sequence[int] = (),
    after: Callable[[int, list[Metrics]], None] = lambda done, steps: None,
    put: Callable[[list[Any]], Any] = lambda rows: put_sequences(rows),
    method: str = "sft_steps",
) -> list[Metrics]:
    """Train the steps of a phase after the first `start`; returns their metrics. Shows a progress bar.

    rows: a sequence, e.g. SFTRows; put(rows of a batch) makes what `method` of the actor trains on.
    pauses: intervals in steps at whose multiples a call ends; after(done, metrics of the call) runs after each.
    The actor's optimizer must have made `start` steps: `start_sft_phase` makes a fresh one, a checkpoint restores one.
    """
    stream = itertools.islice(batches(len(rows), phase, seed), start, None)
    history: list[Metrics] = []
    done = start
    with tqdm(total=phase.steps, initial=start, desc=phase.name, unit="step", leave=False, disable=None) as bar:
        while done < phase.steps:
            count = min(_STEPS_PER_CALL, phase.steps - done, *(e - done % e for e in pauses if e > 0))
            lrs = [learning_rate(phase, done + i) for i in range(count)]
            chunk = [put([rows[i] for i in indices]) for indices in itertools.islice(stream, count)]
            steps = list(actor.call(method, chunk, lrs, timeout_s=timeout_s)[0])
            history += steps
            done += count
            bar.update(count)
            bar.set_postfix(loss=f"{next(v for k, v in steps[-1].items() if k.endswith('/loss')):.3f}")
            after(done, steps)
    return history


def validation_loss(actor: WorkerGroup, rows: SFTRows, batch_size: int, timeout_s: float) -> float:
    """Mean cross entropy of the trained tokens of all rows under the current weights, in nats a token."""
    total = tokens = 0.0
    for first in range(0, len(rows), batch_size):
        batch = put_sequences([rows[i] for i in range(first, min(first + batch_size, len(rows)))])
        summed = actor.call("sft_validation", batch, timeout_s=timeout_s)[0]
        total += summed["loss"]
        tokens += summed["tokens"]
    return total / tokens
