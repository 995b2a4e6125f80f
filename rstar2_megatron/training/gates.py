"""Gates: checks before the first update, some at every step; a run that fails one ends with the figures and the remedy.

They find errors that spoil a run silently: a prompt without its tool, a mask that trains tool output, an engine that
samples from other weights than the actor trains.
"""

from __future__ import annotations

from collections.abc import Sequence

from rstar2_megatron.trajectory import Trajectory, oldest_version

# Largest |log-prob actor - log-prob engine| of one token in fp32; bf16 is judged by the mean instead.
MAX_LOGPROB_DIFF_FP32 = 1e-3
MAX_MEAN_LOGPROB_DIFF_BF16 = 0.05


class GateError(RuntimeError):
    """A gate failed; the message says which, with the figures and the remedy."""


def check_trained_tokens(trajectories: Sequence[Trajectory], batched: int) -> None:
    """The batch must train exactly the tokens that the rollout marked as generated; it holds `batched` of them."""
    rolled = sum(t.num_trained_tokens for t in trajectories)
    if rolled != batched:
        raise GateError(
            f"the rollout generated {rolled} trained tokens but the training batch holds {batched}; tool text may be "
            "trained or answers lost. This is a bug in batch building, please report it"
        )


def check_actor_tokens(batched: int, trained_tokens: float) -> None:
    """The actor must have trained all `batched` marked tokens of the batch, over all ranks and micro-batches."""
    if round(trained_tokens) != batched:
        raise GateError(
            f"the training batch holds {batched} trained tokens but the actor trained {trained_tokens:.0f}; packing lost or "
            "doubled some. This is a bug in the actor, please report it"
        )


def check_staleness(trajectories: Sequence[Trajectory], version: int, bound: int) -> None:
    """No token that weights `version` train may be of a version before `version - bound`."""
    oldest = oldest_version(trajectories)
    if oldest is not None and oldest < version - bound:
        raise GateError(
            f"the batch for weights {version} has tokens of version {oldest}, more than algorithm.max_staleness={bound} older; "
            "this is a bug in the schedule, please report it"
        )


def check_logprobs(difference: dict[str, float], precision: str) -> None:
    """Actor and engine must agree on the tokens the engine generated (`logprob_difference`)."""
    _check_agreement(
        difference,
        precision,
        what="actor and engine disagree on the first batch",
        remedy="Check that rollout.model.model_path is the actor's model, that rollout.model.precision equals "
        "actor.model.precision, and algorithm.sampling_params.temperature",
    )


def check_resumed_logprobs(difference: dict[str, float], precision: str) -> None:
    """A resumed actor must score a group as it did when the checkpoint was written (`logprob_difference`)."""
    _check_agreement(
        difference,
        precision,
        what="the resumed actor scores the group saved with the checkpoint otherwise than when it was saved",
        remedy="The weights or the model's code are not what they were: resume from an earlier global_step_N by "
        "runner.resume_dir, and please report this",
    )


def _check_agreement(difference: dict[str, float], precision: str, *, what: str, remedy: str) -> None:
    mean, largest = difference["mean"], difference["max"]
    too_far = largest > MAX_LOGPROB_DIFF_FP32 if precision == "fp32" else mean > MAX_MEAN_LOGPROB_DIFF_BF16
    if too_far or mean != mean:
        raise GateError(
            f"{what}: |log-prob difference| mean {mean:.2e}, max {largest:.2e} over {difference['tokens']:.0f} tokens "
            f"({precision}; allowed max {MAX_LOGPROB_DIFF_FP32:g} in fp32, mean {MAX_MEAN_LOGPROB_DIFF_BF16:g} in bf16). "
            f"{remedy}"
        )


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
