"""Sampling and limits of one rollout phase. Training and evaluation differ only in them."""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.rollout.phase import Tail
from rstar2_megatron.settings.schema import SamplingParams, Settings


@dataclass(frozen=True)
class RolloutSpec:
    """Sampling and limits of one phase."""

    samples: int  # trajectories per problem
    sampling: SamplingParams
    max_assistant_turns: int
    tail: Tail = "wait"
    resume_carried: bool = False  # resume the groups that the last training phase carried over
    phase: int = 0  # set by the driver, increases by one each phase
    seed: int | None = None  # of the run, with rollout.request_seeds
    texts: bool = False  # whether rewards of the user may read `Trajectory.response_text`
    number: int = 0  # of the step, for the seeds of groups that begin in this phase; 0: evaluation

    @classmethod
    def training(cls, settings: Settings, step: int = 0) -> RolloutSpec:
        return cls(
            samples=settings.algorithm.group_size,
            sampling=settings.algorithm.sampling_params,
            max_assistant_turns=settings.agentloop.max_assistant_turns,
            tail=settings.rollout.tail,
            resume_carried=True,
            seed=request_seed_of(settings),
            texts=settings.reward.has_own,
            number=step,
        )

    @classmethod
    def evaluation(cls, settings: Settings) -> RolloutSpec:
        evaluation = settings.evaluation
        most = evaluation.max_new_tokens or settings.algorithm.sampling_params.max_new_tokens
        return cls(
            samples=evaluation.num_samples,
            sampling=SamplingParams(temperature=evaluation.temperature, max_new_tokens=most),
            max_assistant_turns=evaluation.max_assistant_turns or settings.agentloop.max_assistant_turns,
            seed=request_seed_of(settings),
            texts=settings.reward.has_own,
        )


def request_seed_of(settings: Settings) -> int | None:
    """The seed of which requests make theirs; None: the engine's random numbers."""
    return settings.actor.seed if settings.rollout.request_seeds else None
