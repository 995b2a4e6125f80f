"""The rollout workers, some of which may have died. The others go on; a lost one is started again in its place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

from rstar2_megatron.cluster.calls import DeadlineExceeded, PendingCall, WorkerFailed, WorkerGroup, WorkerLost

logger = logging.getLogger(__name__)

# arguments: rank, which start of its worker this is (1: the first again); returns the Ray handle and the name in RLinf
Relaunch = Callable[[int, int], tuple[Any, str]]


class RolloutGroup(WorkerGroup):
    """A worker that dies is in `lost` and is left out of every later call, until `restart`.

    A call on named ranks needs all of them: it raises WorkerLost. Any other call of a group that has lost all its workers
    has no results.
    """

    def __init__(self, name: str, rlinf_group: Any, relaunch: Relaunch, max_restarts: int) -> None:
        super().__init__(name, rlinf_group)
        self.names = [f"{name}:{rank}" for rank in range(len(self))]
        """Names in RLinf, in rank order."""
        self.restarts: Counter[int] = Counter()
        """Restarts of a rank's worker in this run, failed ones included."""
        self.changes = 0
        """Grows whenever a worker is lost or started."""
        self.on_lost = self.lose
        self._relaunch = relaunch
        self._max_restarts = max_restarts
        self._start_arguments: tuple[str, str] = ("", "")

    def lose(self, rank: int, reason: str) -> None:
        """Go on without this worker, which has died or cannot bring its engine back."""
        if rank in self.lost:
            return
        self.lost[rank] = reason
        self.changes += 1
        ray.kill(self.workers[rank])
        self.workers[rank] = None
        logger.warning("engine %d is lost with its worker, %d of %d go on: %s", rank, len(self.alive), len(self), reason)

    def start_engines(self, model_path: str, judge_url: str) -> PendingCall:
        """Start every engine (`RolloutWorker.start_engine`). Here a worker's death fails the call."""
        self._start_arguments = (model_path, judge_url)
        return self.start("start_engine", model_path, judge_url, ranks=range(len(self)))

    @property
    def restartable(self) -> list[int]:
        """Lost ranks that were restarted fewer times than `rollout.max_engine_restarts`."""
        return [rank for rank in self.lost if self.restarts[rank] < self._max_restarts]

    def restart(self, timeout_s: float) -> list[int]:
        """Start lost workers and their engines again, in their places; returns the ranks that run.

        Their engines have the weights of the model's files. One that cannot be started stays lost, with a warning.
        """
        started: list[tuple[int, PendingCall]] = []
        for rank in self.restartable:
            self.restarts[rank] += 1
            self.workers[rank], self.names[rank] = self._relaunch(rank, self.restarts[rank])
            del self.lost[rank]
            self.changes += 1
            started.append((rank, self.start("start_engine", *self._start_arguments, ranks=[rank])))
        for rank, call in started:
            try:
                call.result(timeout_s)
            except (WorkerFailed, WorkerLost, DeadlineExceeded) as error:
                self.lose(rank, f"its restart failed: {error}")
            else:
                logger.warning(
                    "engine %d runs again in a new worker (restart %d of %d)", rank, self.restarts[rank], self._max_restarts
                )
        return [rank for rank, _ in started if rank not in self.lost]
