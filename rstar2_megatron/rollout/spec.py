"""Sampling and limits of one rollout phase. Training and evaluation differ only in them."""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.rollout.phase import Tail
from rstar2_megatron.settings.schema import Settings


@dataclass(frozen=True)
class RolloutSpec:
    """Sampling and limits of one phase."""

    samples: int  # trajectories per problem
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int  # response budget in tokens, tool responses included
    max_assistant_turns: int
    tail: Tail = "wait"
    resume_carried: bool = False  # resume the groups that the last training phase carried over
    phase: int = 0  # set by the driver, increases by one each phase
    seed: int | None = None  # of the run, with rollout.request_seeds
    number: int = 0  # of the step, for the seeds of groups that begin in this phase; 0: evaluation

    @classmethod
    def training(cls, settings: Settings, step: int = 0) -> RolloutSpec:
        sampling = settings.algorithm.sampling_params
        return cls(
            samples=settings.algorithm.group_size,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            max_assistant_turns=settings.agentloop.max_assistant_turns,
            tail=settings.rollout.tail,
            resume_carried=True,
            seed=_seed(settings),
            number=step,
        )

    @classmethod
    def evaluation(cls, settings: Settings) -> RolloutSpec:
        sampling, evaluation = settings.algorithm.sampling_params, settings.evaluation
        return cls(
            samples=evaluation.num_samples,
            temperature=evaluation.temperature,
            top_p=1.0,
            top_k=-1,
            max_new_tokens=evaluation.max_new_tokens or sampling.max_new_tokens,
            max_assistant_turns=evaluation.max_assistant_turns or settings.agentloop.max_assistant_turns,
            seed=_seed(settings),
        )


def _seed(settings: Settings) -> int | None:
    return settings.actor.seed if settings.rollout.request_seeds else None
