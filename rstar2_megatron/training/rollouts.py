"""One rollout phase: problems in, graded groups out, over the rollout channel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from rstar2_megatron.cluster.calls import ChannelReader, PendingCall
from rstar2_megatron.cluster.calls import Group as WorkerGroup
from rstar2_megatron.cluster.keys import GRADED, GROUPS, PROBLEMS
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.stats import combine
from rstar2_megatron.trajectory import Group, Problem


@dataclass
class RolloutPhase:
    """Graded groups in the order of their problems, with the engines' figures added up."""

    groups: list[Group]
    seconds: float
    stats: dict[str, float] = field(default_factory=dict)


class RolloutCoordinator:
    """The driver's end of the rollout channel."""

    def __init__(self, channel: Any, rollout: WorkerGroup, reward: WorkerGroup, timeout_s: float) -> None:
        self._channel = channel
        self._rollout = rollout
        self._timeout_s = timeout_s
        self._graded = ChannelReader(channel, GRADED)
        self._grading: PendingCall = reward.start("serve", channel)
        self._num_reward_workers = len(reward)

    def run(self, problems: Sequence[Problem], spec: RolloutSpec, label: str) -> RolloutPhase:
        """Roll out `spec.samples` trajectories of each problem and grade them.

        Engines pull problems from the channel, so a quick engine takes more of them. Raises WorkerFailed,
        WorkerLost or DeadlineExceeded; never waits longer than `timeout_s`.
        """
        start = time.perf_counter()
        for problem in problems:
            self._channel.put(problem, key=PROBLEMS)
        for _ in range(len(self._rollout)):
            self._channel.put(None, key=PROBLEMS)
        pending = self._rollout.start("generate", self._channel, spec)

        def check() -> None:
            pending.check()
            self._grading.check()

        arrived: dict[str, Group] = {}
        with tqdm(total=len(problems), desc=label, unit="group", leave=False, disable=None) as bar:
            while len(arrived) < len(problems):
                left = self._timeout_s - (time.perf_counter() - start)
                group = self._graded.get(left, while_waiting=check)
                arrived[group.problem.query_id] = group
                bar.update()
        stats = combine(pending.result(60.0))
        ordered = [arrived[problem.query_id] for problem in problems]
        return RolloutPhase(ordered, time.perf_counter() - start, stats)

    def close(self) -> None:
        """Let the reward workers end their loop."""
        for _ in range(self._num_reward_workers):
            self._channel.put(None, key=GROUPS)
