"""Step-0 gates: what must hold before the first update, or the run fails and says what to do.

Each of these has silently spoiled somebody's run elsewhere: a prompt without its tool, a mask that trains tool
output, an engine that samples from other weights than the actor trains.
"""

from __future__ import annotations

from collections.abc import Sequence

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.trajectory import Trajectory

# Largest |log-prob actor - log-prob engine| of one token in fp32; bf16 is judged by the mean instead.
MAX_LOGPROB_DIFF_FP32 = 1e-3
MAX_MEAN_LOGPROB_DIFF_BF16 = 0.05


class GateError(RuntimeError):
    """A step-0 gate failed; the message says which, with the figures and the remedy."""


def check_trained_tokens(trajectories: Sequence[Trajectory], sequences: Sequence[TrainSequence]) -> None:
    """The batch must train exactly the tokens that the rollout marked as generated."""
    rolled = sum(t.num_trained_tokens for t in trajectories)
    batched = sum(sum(s.loss_mask) for s in sequences)
    if rolled != batched:
        raise GateError(
            f"the rollout generated {rolled} trained tokens but the training batch holds {batched}; tool text may be "
            "trained or answers lost. This is a bug in batch building, please report it"
        )


def check_actor_tokens(sequences: Sequence[TrainSequence], trained_tokens: float) -> None:
    """The actor must have trained every marked token of the batch, on whatever ranks and micro-batches."""
    batched = sum(sum(s.loss_mask) for s in sequences)
    if round(trained_tokens) != batched:
        raise GateError(
            f"the training batch holds {batched} trained tokens but the actor trained {trained_tokens:.0f}; packing lost or "
            "doubled some. This is a bug in the actor, please report it"
        )


def check_logprobs(
    sequences: Sequence[TrainSequence], actor_logprobs: Sequence[Sequence[float]], precision: str
) -> dict[str, float]:
    """Actor and engine must agree on the tokens the engine generated.

    `actor_logprobs[i]` has one entry per token of `sequences[i]`. Returns the mean and maximum difference.
    """
    diffs = [
        abs(ours - theirs)
        for sequence, logprobs in zip(sequences, actor_logprobs, strict=True)
        for ours, theirs, trained in zip(logprobs, sequence.rollout_logprobs, sequence.loss_mask, strict=True)
        if trained
    ]
    if not diffs:
        return {"mean": 0.0, "max": 0.0}
    mean, largest = sum(diffs) / len(diffs), max(diffs)
    too_far = largest > MAX_LOGPROB_DIFF_FP32 if precision == "fp32" else mean > MAX_MEAN_LOGPROB_DIFF_BF16
    if too_far or mean != mean:
        raise GateError(
            f"actor and engine disagree on the first batch: |log-prob difference| mean {mean:.2e}, max {largest:.2e} over "
            f"{len(diffs)} tokens ({precision}; allowed max {MAX_LOGPROB_DIFF_FP32:g} in fp32, mean "
            f"{MAX_MEAN_LOGPROB_DIFF_BF16:g} in bf16). Check that rollout.model.model_path is the actor's model, that "
            "rollout.model.precision equals actor.model.precision, and algorithm.sampling_params.temperature"
        )
    return {"mean": mean, "max": largest}


def check_weights(actor: dict[str, int], engine: dict[str, int], engine_rank: int) -> None:
    """After a sync every tensor of the engine must be the actor's, by checksum."""
    missing = sorted(set(actor) ^ set(engine))
    if missing:
        raise GateError(
            f"actor and engine {engine_rank} hold different tensors, e.g. {missing[:5]} ({len(missing)} in all); they were "
            "not started from the same Hugging Face model"
        )
    differing = sorted(name for name in actor if actor[name] != engine[name])
    if differing:
        raise GateError(
            f"after the weight sync {len(differing)} of {len(actor)} tensors of engine {engine_rank} differ from the actor's, "
            f"e.g. {differing[:5]}; the sync is broken, do not train on this"
        )
