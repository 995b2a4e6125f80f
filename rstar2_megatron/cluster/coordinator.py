"""Runs rollout phases from the driver: hands out problems and collects graded groups, over the rollout channel."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rstar2_megatron.algorithm.early_stop import cut_rule
from rstar2_megatron.cluster.calls import ChannelReader, EnginesLost, PendingCall, WorkerGroup
from rstar2_megatron.cluster.channel import ENDED, TO_DRIVER, work_key
from rstar2_megatron.cluster.tokens import TokenSource
from rstar2_megatron.records.trace import TRACE
from rstar2_megatron.rollout.live_view import LiveView, ShowProgress
from rstar2_megatron.rollout.messages import EngineGone, WorkAnswer, WorkRequest
from rstar2_megatron.rollout.phase import OpenGroup, RolloutPhase
from rstar2_megatron.rollout.progress import PhaseProgress
from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.stats import combine
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import FinishReason, Group, Problem

logger = logging.getLogger(__name__)
_LAST_MESSAGES_S = 60.0

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
    """The driver's end of the rollout channel: answers engines that request work, and collects graded trajectories."""

    def __init__(self, channel: Any, rollout: WorkerGroup, reward: WorkerGroup, settings: Settings) -> None:
        self.carried: list[OpenGroup] = []
        """Unfinished groups of the last training phase (rollout.tail=carry). Part of a checkpoint."""
        self._channel = channel
        self._rollout = rollout
        self._settings = settings
        self._timeout_s = settings.runner.step_timeout_s
        self.tokens = TokenSource(rollout, self._timeout_s)
        self._inbox = ChannelReader(channel, TO_DRIVER)
        self._grading: PendingCall = reward.start("serve", channel)
        self._num_reward_workers = len(reward)
        self._phases = 0
        self._lengths = LengthSurvival(settings.runner.seq_length)
        self.show_progress: ShowProgress = lambda progress: None
        """Gets the progress of a running phase every few seconds."""

    def run(
        self, problems: Sequence[Problem], spec: RolloutSpec, label: str, refill: Refill | None = None
    ) -> PhaseResult:
        """Roll out `spec.samples` trajectories of each problem and grade them.

        Engines request slices of groups, so a faster engine gets more. `spec.tail` sets whether the phase waits for every
        trajectory. `refill` is called whenever a group is complete, and may add problems. Raises WorkerFailed, WorkerLost,
        EnginesLost, or DeadlineExceeded after `runner.step_timeout_s`.
        """
        self._phases += 1
        spec = replace(spec, phase=self._phases)
        phase = self._open(problems, spec)
        start = time.monotonic()
        pending = self._rollout.start("generate", self._channel, spec)
        run = _PhaseServer(self._channel, phase, spec.phase, len(self._rollout), refill)

        ask = functools.partial(self._rollout.start, "load")
        live = LiveView(ask, phase, PhaseProgress(label, self._lengths), self.show_progress)

        def check() -> None:
            pending.check()
            self._grading.check()
            live.poll()

        def receive() -> None:
            left = self._timeout_s - (time.monotonic() - start)
            run.handle(self._inbox.get(left, while_waiting=check), time.monotonic())
            live.poll()

        with contextlib.closing(live):
            while not phase.over:
                receive()
            run.end()
            if phase.num_open:
                self._rollout.call("end_phase", spec.tail == "cut", timeout_s=_LAST_MESSAGES_S)
            left = self._timeout_s - (time.monotonic() - start)
            workers = pending.result(left if phase.num_open else min(left, _LAST_MESSAGES_S))
            while phase.reported < sum(sums["reported"] for sums in workers):
                receive()
        groups, carried = phase.finish()
        self.tokens.fetch(t for group in carried for t in group.ended.values())
        for trajectory in (t for group in groups for t in group.usable):
            self._lengths.add(trajectory.response_tokens)
        if spec.resume_carried:
            self.carried = carried
        seconds = time.monotonic() - start
        stats = {**combine(workers, seconds), **run.stats(groups, carried)}
        return PhaseResult(groups, seconds, stats)

    def _open(self, problems: Sequence[Problem], spec: RolloutSpec) -> RolloutPhase:
        rollout = self._settings.rollout
        phase = RolloutPhase(
            WorkQueue(rollout.scheduler, len(self._rollout), rollout.slice_size),
            spec.samples,
            tail=spec.tail,
            may_cut=cut_rule(self._settings.algorithm.down_sampling, rollout.cut_share),
            carry_share=rollout.carry_share,
            max_carry_age=rollout.max_carry_age,
        )
        carried = self.carried if spec.resume_carried else []
        phase.add([*carried, *(OpenGroup(problem, spec.samples) for problem in problems)])
        return phase

    def restore(self, carried: list[OpenGroup]) -> None:
        """Resume a checkpoint's unfinished groups. A trajectory that had a live interpreter starts from its prompt."""
        for group in carried:
            group.parked = {index: t for index, t in group.parked.items() if not t.session}
        self.carried = carried

    def close(self) -> None:
        """End the loops of the reward workers and the reading thread of this process."""
        for _ in range(self._num_reward_workers):
            self._channel.put(None, key=ENDED)
        self._inbox.close()


class _PhaseServer:
    """State of one running phase: handles incoming messages and answers work requests."""

    def __init__(
        self, channel: Any, phase: RolloutPhase, number: int, num_engines: int, refill: Refill | None
    ) -> None:
        self.complete: list[Group] = []
        self._channel = channel
        self._phase = phase
        self._number = number
        self._num_engines = num_engines
        self._refill = refill
        self._pending_requests: list[WorkRequest] = []  # not answered yet
        self._tail_since: float | None = None  # when an engine first had room and no work was left
        # when the last trajectory ended on its engine, before it was graded
        self._last_token = time.monotonic()
        self._refilled = 0
        self._gone: dict[int, str] = {}  # reasons by lost engine

    def handle(self, message: Any, now: float) -> None:
        """Handle a WorkRequest, an EngineGone or a list of RolloutResult. Messages of an earlier phase are ignored.

        Raises EnginesLost when no engine is left.
        """
        if isinstance(message, WorkRequest):
            if message.phase == self._number:
                self._pending_requests.append(message)
        elif isinstance(message, EngineGone):
            if message.phase == self._number:
                self._lose(message)
        else:
            for ended in message:
                if ended.phase == self._number:
                    self._last_token = max(self._last_token, now - ended.grading_s)
                    group = self._phase.ended(ended.engine, ended.group, ended.trajectory, now)
                    if group is not None:
                        self.complete.append(group)
                        self._ask_for_more()
        if self._phase.handed_out:
            return
        self._pending_requests = [
            request for request in self._pending_requests if not self._serve(request, now)
        ]
        if self._pending_requests and not self._phase.queue.left and self._tail_since is None:
            self._tail_since = now

    def _lose(self, message: EngineGone) -> None:
        self._gone[message.engine] = message.reason
        if len(self._gone) == self._num_engines:
            raise EnginesLost(f"no engine is left: {message.reason}")
        logger.warning("engine %d is gone, the others take its work: %s", message.engine, message.reason)
        self._phase.queue.lose_engine(message.engine)
        self._pending_requests = [
            request for request in self._pending_requests if request.engine != message.engine
        ]

    def _serve(self, request: WorkRequest, now: float) -> bool:
        work = self._phase.take(request.engine, request.room, now)
        if work:
            self._channel.put(WorkAnswer(self._number, work), key=work_key(request.engine))
        return bool(work)

    def _ask_for_more(self) -> None:
        if self._refill is None or self._phase.handed_out:
            return
        more = self._refill(self.complete, self._phase.num_open)
        if more:
            self._phase.add_problems(more)
            self._refilled += len(more)
            self._tail_since = None

    def end(self) -> None:
        """Stop handing out work, and tell every engine that the phase is over."""
        self._phase.handed_out = True
        for engine in range(self._num_engines):
            self._channel.put(WorkAnswer(self._number, None), key=work_key(engine))

    def stats(self, groups: Sequence[Group], carried: Sequence[OpenGroup]) -> dict[str, float]:
        """Statistics that only the driver can count."""
        now = time.monotonic()
        grading = max(0.0, now - self._last_token)
        tail = 0.0 if self._tail_since is None else max(0.0, now - self._tail_since)
        TRACE.add("grading after the last token", now - grading, now)
        TRACE.add("tail", now - tail, now)
        cut = sum(t.finish_reason is FinishReason.CUT for group in groups for t in group.trajectories)
        return {
            "tail_seconds": tail,
            "grading_seconds": grading,
            "engines_gone": float(len(self._gone)),
            "refilled_problems": float(self._refilled),
            "cut_trajectories": float(cut),
            "carried_groups": float(len(carried)),
            "carried_trajectories": float(sum(len(group.parked) for group in carried)),
        }
