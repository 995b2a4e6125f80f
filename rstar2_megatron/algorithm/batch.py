"""The actor's training data: one kept trajectory as flat lists, in the engine's order of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rstar2_megatron.trajectory import Trajectory


@dataclass(slots=True)
class TrainSequence:
    """Prompt and response of one trajectory; all per-token lists have `len(input_ids)` entries.

    `loss_mask[i]` and `rollout_logprobs[i]` belong to token `i`, not to the prediction made at position `i`: the log-prob
    of token `i` comes from the model's output at position `i - 1`. Prompt, tool text and turn headers have mask 0 and
    log-prob 0.0.
    """

    input_ids: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float]
    advantage: float

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.loss_mask)

    def check(self) -> None:
        """Raise ValueError when the lists differ in length, the first token is trained, or a number is not finite."""
        lengths = (len(self.input_ids), len(self.loss_mask), len(self.rollout_logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(
                "input_ids {}, loss_mask {}, rollout_logprobs {} differ in length".format(*lengths)
            )
        if not self.input_ids:
            raise ValueError("empty training sequence")
        if self.loss_mask[0]:
            raise ValueError("token 0 has no log-prob and cannot be trained, but loss_mask[0] is 1")
        if not math.isfinite(self.advantage):
            raise ValueError(f"advantage {self.advantage} is not finite")
        for position, value in enumerate(self.rollout_logprobs):
            if not math.isfinite(value):
                raise ValueError(f"rollout log-prob {value} at token {position} is not finite")


def train_sequence(trajectory: Trajectory, advantage: float) -> TrainSequence:
    """The TrainSequence of a trajectory. Raises ValueError for a trajectory that cannot be trained on."""
    trajectory.check()
    if not trajectory.usable:
        raise ValueError(
            f"trajectory {trajectory.query_id}#{trajectory.rollout_index} ended with "
            f"{trajectory.finish_reason}: it must be dropped, not trained on"
        )
    prompt_length = len(trajectory.prompt_ids)
    sequence = TrainSequence(
        input_ids=[*trajectory.prompt_ids, *trajectory.response_ids],
        loss_mask=[0] * prompt_length + list(trajectory.loss_mask),
        rollout_logprobs=[0.0] * prompt_length + [float(x) for x in trajectory.rollout_logprobs],
        advantage=float(advantage),
    )
    try:
        sequence.check()
    except ValueError as error:
        raise ValueError(f"trajectory {trajectory.query_id}#{trajectory.rollout_index}: {error}") from None
    return sequence
