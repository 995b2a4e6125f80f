"""Which tokens are left out of the loss because the policy that generated them is too far from the actor's.

`ratio` of a token is actor / engine, both log-probs taken before the update. Four rules, each off by default and all of them
together if set; a token that one of them leaves out is not counted in any denominator:

- IcePop: a token whose ratio is outside a band;
- MIS, sequence: all tokens of a sequence whose product of ratios is outside a band;
- MIS, geometric: all tokens of a sequence whose geometric mean of ratios is outside a band;
- decoupled PPO: a token whose ratio, the weight of its loss, is above a cap (arXiv 2505.24298).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.settings.schema import AlgorithmSettings
from rstar2_megatron.trajectory import generated_spans

Band = tuple[float, float]


def has_rules(algorithm: AlgorithmSettings) -> bool:
    """Whether one of the rules is on."""
    return any((algorithm.icepop, algorithm.mis_sequence, algorithm.mis_geometric, _weight_cap(algorithm)))


def _weight_cap(algorithm: AlgorithmSettings) -> float | None:
    return algorithm.decoupled_weight_cap if algorithm.decoupled_loss else None


def kept_tokens(log_ratio: np.ndarray, loss_mask: np.ndarray, algorithm: AlgorithmSettings) -> np.ndarray:
    """The loss mask (uint8) without the tokens that the rules leave out.

    log_ratio, loss_mask: `[tokens]` of one sequence; log_ratio = actor - engine, anything where the mask is 0.
    """
    trained = loss_mask.astype(bool)
    if not trained.any():
        return loss_mask
    of_trained = np.asarray(log_ratio, np.float64)[trained]
    keep = np.ones(len(of_trained), bool)
    if algorithm.icepop:
        keep &= _inside(of_trained, algorithm.icepop)
    if cap := _weight_cap(algorithm):
        keep &= of_trained <= np.log(cap)
    for band, value in ((algorithm.mis_sequence, of_trained.sum()), (algorithm.mis_geometric, of_trained.mean())):
        if band and not _inside(value, band):
            keep[:] = False
    left = loss_mask.copy()
    left[trained] = keep
    return left


def without_mismatch(
    sequences: Sequence[TrainSequence], actor_logprobs: Sequence[np.ndarray], algorithm: AlgorithmSettings
) -> tuple[list[TrainSequence], dict[str, float]]:
    """The sequences with the masks of `kept_tokens`, and the shares of trained tokens and sequences that are left out.

    actor_logprobs: one array a sequence, one entry a token.
    """
    masks = [
        kept_tokens(actor - s.rollout_logprobs, s.loss_mask, algorithm)
        for s, actor in zip(sequences, actor_logprobs, strict=True)
    ]
    before, after = [s.num_trained_tokens for s in sequences], [int(np.count_nonzero(m)) for m in masks]
    gone = sum(had > 0 and not has for had, has in zip(before, after))
    shares = {
        "masked_tokens": float(sum(before) - sum(after)),
        "masked_token_fraction": 1 - sum(after) / max(sum(before), 1),
        "masked_sequence_fraction": gone / max(sum(had > 0 for had in before), 1),
    }
    return [replace(s, loss_mask=mask, generated=s.loss_mask) for s, mask in zip(sequences, masks)], shares


def mismatch_by_turn(
    sequences: Sequence[TrainSequence], actor_logprobs: Sequence[np.ndarray], most: int = 8
) -> dict[str, float]:
    """Mean of |actor - engine| over the trained tokens of the first, second, ... turn; `most` stands for all from there on.

    A turn is a run of trained tokens. Keys are turn numbers from 1.
    """
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for s, actor in zip(sequences, actor_logprobs, strict=True):
        for number, (start, end) in enumerate(generated_spans(s.loss_mask), start=1):
            turn = min(number, most)
            differences = np.abs(np.asarray(actor[start:end], np.float64) - s.rollout_logprobs[start:end])
            sums[turn] = sums.get(turn, 0.0) + float(differences.sum())
            counts[turn] = counts.get(turn, 0) + end - start
    return {str(turn): sums[turn] / counts[turn] for turn in sorted(sums)}


def _inside(log_ratio: np.ndarray | float, band: Band) -> np.ndarray:
    low, high = np.log(band)
    return (log_ratio >= low) & (log_ratio <= high)
