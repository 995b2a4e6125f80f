"""The actor's training data: kept trajectories as flat arrays, in the engine's order of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rstar2_megatron.trajectory import PerToken, Trajectory, generated_spans


@dataclass(slots=True, eq=False)
class TrainSequence(PerToken):
    """Prompt and response of one trajectory; all per-token arrays have `len(input_ids)` entries.

    `loss_mask[i]` and `rollout_logprobs[i]` belong to token `i`, not to the prediction made at position `i`: the log-prob
    of token `i` comes from the model's output at position `i - 1`. Prompt, tool text and turn headers have mask 0 and
    log-prob 0.0.
    """

    ARRAYS: ClassVar[dict[str, type]] = {"input_ids": np.int32, "loss_mask": np.uint8, "rollout_logprobs": np.float32}

    input_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantage: float | np.ndarray = 0.0
    """Of the trajectory, or of each token (`over_turns`)."""
    generated: np.ndarray | None = None
    """`loss_mask` before a rule of `algorithm.mismatch` left tokens out of it. None: none did."""

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


def train_sequence(trajectory: Trajectory) -> TrainSequence:
    """The TrainSequence of a trajectory, without its advantage. Raises ValueError for one that cannot be trained on."""
    trajectory.check()
    name = f"trajectory {trajectory.query_id}#{trajectory.rollout_index}"
    if not trajectory.usable:
        raise ValueError(f"{name} ended with {trajectory.finish_reason}: it must be dropped, not trained on")
    if trajectory.held:
        raise ValueError(f"{name}: its tokens are with rollout worker {trajectory.held.worker}, not here")
    prompt_length = len(trajectory.prompt_ids)
    wrong = np.flatnonzero(~np.isfinite(trajectory.rollout_logprobs))
    if len(wrong):
        value = trajectory.rollout_logprobs[wrong[0]]
        raise ValueError(f"{name}: rollout log-prob {value} at token {prompt_length + wrong[0]} is not finite")
    return TrainSequence(
        input_ids=np.concatenate([trajectory.prompt_ids, trajectory.response_ids]),
        loss_mask=np.concatenate([np.zeros(prompt_length, np.uint8), trajectory.loss_mask]),
        rollout_logprobs=np.concatenate([np.zeros(prompt_length, np.float32), trajectory.rollout_logprobs]),
    )


def over_turns(loss_mask: np.ndarray, advantages: Sequence[float]) -> np.ndarray:
    """float32 [tokens]: each run of generated tokens has the advantage of its turn, all other tokens 0."""
    result = np.zeros(len(loss_mask), np.float32)
    for (start, end), advantage in zip(generated_spans(loss_mask), advantages):
        result[start:end] = advantage
    return result


def places_behind_tools(generated: np.ndarray) -> np.ndarray:
    """int32 [tokens]: place, from 1, of a generated token behind the tool response before it; 0 in the first turn."""
    result = np.zeros(len(generated), np.int32)
    for start, end in generated_spans(generated)[1:]:
        result[start:end] = np.arange(1, end - start + 1)
    return result


@dataclass(slots=True, frozen=True)
class TokenBlock:
    """Training sequences one after another, without advantages: three arrays over all their tokens, and where each ends.

    Ray's object store keeps a block once on each node; every rank reads it there without a copy.
    """

    input_ids: np.ndarray  # [tokens] int32
    loss_mask: np.ndarray  # [tokens] uint8
    rollout_logprobs: np.ndarray  # [tokens] float32
    ends: np.ndarray  # [sequences] int64

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> TokenBlock:
        """The block of one or more sequences."""
        return cls(
            np.concatenate([s.input_ids for s in sequences]),
            np.concatenate([s.loss_mask for s in sequences]),
            np.concatenate([s.rollout_logprobs for s in sequences]),
            np.cumsum([s.length for s in sequences]),
        )

    def sequence(self, row: int, advantage: float | Sequence[float]) -> TrainSequence:
        """Sequence `row`, as views of the block. advantage: of the trajectory, or of its turns."""
        tokens = slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))
        mask = self.loss_mask[tokens]
        given = advantage if isinstance(advantage, float) else over_turns(mask, advantage)
        return TrainSequence(self.input_ids[tokens], mask, self.rollout_logprobs[tokens], given)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(slots=True, frozen=True)
class TrainBatch:
    """Training sequences as the driver holds them: where their tokens are, and their advantages."""

    blocks: list[Any]  # references of TokenBlocks in the object store
    block: np.ndarray  # [sequences] index into `blocks`
    row: np.ndarray  # [sequences] row of that block
    advantages: np.ndarray  # [sequences] or [sequences, turns] float64
    trained_tokens: int

    def __len__(self) -> int:
        return len(self.row)

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The batch of some sequences; `trained_tokens` stays that of all."""
        return replace(self, block=self.block[indices], row=self.row[indices], advantages=self.advantages[indices])

    def sequences(self, blocks: Sequence[TokenBlock]) -> list[TrainSequence]:
        """The sequences in the batch's order; `blocks` are those that `self.blocks` refers to."""
        rows = zip(self.block.tolist(), self.row.tolist(), self.advantages.tolist(), strict=True)
        return [blocks[block].sequence(row, advantage) for block, row, advantage in rows]


def logprob_difference(sequences: Sequence[TrainSequence], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """Mean and maximum of |logprobs - rollout_logprobs| over the trained tokens, and their number as `tokens`.

    `logprobs[i]` has one entry per token of `sequences[i]`.
    """
    diffs = [
        np.abs(np.asarray(ours, np.float64) - s.rollout_logprobs)[s.loss_mask.astype(bool)]
        for s, ours in zip(sequences, logprobs, strict=True)
    ]
    joined = np.concatenate([np.empty(0), *diffs])
    if not len(joined):
        return {"mean": 0.0, "max": 0.0, "tokens": 0.0}
    return {"mean": float(joined.mean()), "max": float(joined.max()), "tokens": float(len(joined))}
