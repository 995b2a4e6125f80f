"""Runs rollout phases from the driver: hands out problems and collects graded groups, over the rollout channel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rstar2_megatron.algorithm.early_stop import cut_rule
from rstar2_megatron.cluster.calls import NoEngineLeft
from rstar2_megatron.cluster.phases.server import DriverChannel, PhaseEvents, PhaseServer
from rstar2_megatron.cluster.tokens import TokenSource
from rstar2_megatron.records.trace import TRACE
from rstar2_megatron.rollout.phase import OpenGroup, RolloutPhase
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.stats import combine
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import FinishReason, Group, Problem

# arguments: complete groups, number of open groups; returns more problems for this phase, or none
Refill = Callable[[Sequence[Group], int], Sequence[Problem]]


@dataclass
class PhaseResult:
    """Result of a phase: graded groups in the order of their problems, and statistics summed over engines.

    Ended trajectories are without their tokens (`RolloutCoordinator.tokens`).
    """

    groups: list[Group]
    seconds: float
    stats: dict[str, float] = field(default_factory=dict)


class RolloutCoordinator:
    """The driver's end of the rollout channel, for phases that end before anything else is done with the engines."""

    def __init__(self, channel: DriverChannel, settings: Settings) -> None:
        self.carried: list[OpenGroup] = []
        """Unfinished groups of the last training phase (rollout.tail=carry). Part of a checkpoint."""
        self.channel = channel
        self._settings = settings
        self._timeout_s = settings.runner.step_timeout_s
        self.tokens = TokenSource(channel.engines, self._timeout_s)

    def run(self, problems: Sequence[Problem], spec: RolloutSpec, label: str, refill: Refill | None = None) -> PhaseResult:
        """Roll out `spec.samples` trajectories of each problem and grade them.

        Engines request slices of groups, so a faster engine gets more. `spec.tail` sets whether the phase waits for every
        trajectory. `refill` is called whenever a group is complete, and may add problems. The other engines take what an
        engine, or a rollout worker, had when it was lost. Raises WorkerFailed, WorkerLost (a reward worker), NoEngineLeft, or
        DeadlineExceeded after `runner.step_timeout_s`.
        """
        self.channel.phases += 1
        spec = replace(spec, phase=self.channel.phases)
        phase = self._open(problems, spec)
        more = _Refilling(phase, refill, spec.number)
        server = PhaseServer(self.channel, phase, spec, label, more)
        more.server = server
        start = time.monotonic()
        deadline = start + self._timeout_s
        with contextlib.closing(server):
            try:
                server.start()
                while not phase.over:
                    server.receive(deadline - time.monotonic())
                    if phase.over:
                        server.look_for_lost_workers()  # of complete groups they held tokens, which others roll out again
                workers = server.end(cut=spec.tail == "cut", timeout_s=deadline - time.monotonic())
            except NoEngineLeft:
                server.take_back()  # carried groups go into another phase, if there is one
                raise
        groups, carried = phase.finish()
        self.tokens.fetch_ended(carried)
        for trajectory in (t for group in groups for t in group.usable):
            self.channel.lengths.add(trajectory.response_tokens)
        if spec.resume_carried:
            self.carried = carried
        seconds = time.monotonic() - start
        stats = {
            **combine(list(workers.values()), seconds),
            **server.losses(),
            **_stats(server, groups, carried),
            "refilled_problems": float(more.added),
        }
        return PhaseResult(groups, seconds, stats)

    def _open(self, problems: Sequence[Problem], spec: RolloutSpec) -> RolloutPhase:
        rollout = self._settings.rollout
        phase = RolloutPhase(
            WorkQueue(rollout.scheduler, len(self.channel.engines), rollout.slice_size),
            spec.samples,
            tail=spec.tail,
            may_cut=cut_rule(self._settings.algorithm, rollout.cut_share),
            carry_share=rollout.carry_share,
            max_carry_age=rollout.max_carry_age,
        )
        carried = self.carried if spec.resume_carried else []
        phase.add([*carried, *(OpenGroup(p, spec.samples, number=spec.number) for p in problems)])
        return phase

    def restore(self, carried: list[OpenGroup]) -> None:
        """Resume a checkpoint's unfinished groups. A trajectory that had a live interpreter starts from its prompt."""
        for group in carried:
            group.parked = {index: t for index, t in group.parked.items() if not t.session}
        self.carried = carried


class _Refilling(PhaseEvents):
    """Adds problems to a phase while groups become complete."""

    server: PhaseServer
    """Of the phase; set before it starts."""

    def __init__(self, phase: RolloutPhase, refill: Refill | None, number: int) -> None:
        self.added = 0
        self._phase = phase
        self._refill = refill
        self._number = number
        self._complete: dict[int, Group] = {}  # by number

    def completed(self, number: int, group: Group) -> None:
        if number in self._complete:  # it has been counted
            return
        self._complete[number] = group
        if self._refill is None or self._phase.handed_out:
            return
        more = self._refill(list(self._complete.values()), self._phase.num_open)
        if more:
            self._phase.add_problems(more, self._number)
            self.added += len(more)
            self.server.tail_since = None


def _stats(server: PhaseServer, groups: Sequence[Group], carried: Sequence[OpenGroup]) -> dict[str, float]:
    """Statistics of a phase that has ended, which only the driver can count."""
    now = time.monotonic()
    grading = max(0.0, now - server.last_token)
    tail = 0.0 if server.tail_since is None else max(0.0, now - server.tail_since)
    TRACE.add("grading after the last token", now - grading, now)
    TRACE.add("tail", now - tail, now)
    cut = sum(t.finish_reason is FinishReason.CUT for group in groups for t in group.trajectories)
    return {
        "tail_seconds": tail,
        "grading_seconds": grading,
        "cut_trajectories": float(cut),
        "carried_groups": float(len(carried)),
        "carried_trajectories": float(sum(len(group.parked) for group in carried)),
    }
