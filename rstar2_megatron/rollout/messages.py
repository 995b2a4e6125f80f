"""What rollout workers, reward workers and the driver tell each other over the rollout channel."""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.trajectory import Problem, Trajectory


@dataclass(slots=True, frozen=True)
class WorkRequest:
    """An engine has room. The answer, a `WorkAnswer`, comes under `work_key`."""

    engine: int
    phase: int  # one of an earlier phase is void
    room: int  # trajectories that would fit, about


@dataclass(slots=True, frozen=True)
class WorkAnswer:
    """Work for an engine. One of an earlier phase, which that engine no longer waited for, is void."""

    phase: int
    work: list[Slice] | None  # None: the phase is over


@dataclass(slots=True, frozen=True)
class EngineGone:
    """An engine is lost for the rest of the phase; what it had taken comes back as `RolloutResult`, without a finish reason."""

    engine: int
    phase: int
    reason: str


@dataclass(slots=True)
class RolloutResult:
    """A trajectory that ended or was parked; graded on its way to the driver."""

    engine: int
    phase: int
    group: int
    problem: Problem
    trajectory: Trajectory
