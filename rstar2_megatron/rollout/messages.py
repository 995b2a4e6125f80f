"""Messages between rollout workers, reward workers and the driver on the rollout channel."""

from __future__ import annotations

from dataclasses import dataclass

from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.trajectory import Problem, Trajectory


@dataclass(slots=True, frozen=True)
class WorkRequest:
    """An engine has room for work. The driver replies with a `WorkAnswer` under `work_key`."""

    engine: int
    phase: int  # the driver ignores a request of an earlier phase
    room: int  # about how many trajectories would fit


@dataclass(slots=True, frozen=True)
class WorkAnswer:
    """Work for an engine. The engine ignores an answer of an earlier phase."""

    phase: int
    work: list[Slice] | None  # None: the phase is over


@dataclass(slots=True, frozen=True)
class EngineGone:
    """An engine is lost for the rest of the phase.

    Its trajectories come back as `RolloutResult` without a finish reason.
    """

    engine: int
    phase: int
    reason: str


@dataclass(slots=True)
class RolloutResult:
    """A trajectory that ended or was parked. Reward workers grade it on its way to the driver."""

    engine: int
    phase: int
    group: int
    problem: Problem
    trajectory: Trajectory
    grading_s: float = 0.0  # seconds that grading took, of the whole message
