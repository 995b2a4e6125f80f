"""The driver's side of a running phase: answers engines that request work, and collects graded trajectories."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rstar2_megatron.cluster.calls import ChannelReader, DeadlineExceeded, NoEngineLeft, PendingCall, WorkerGroup
from rstar2_megatron.cluster.channel import ENDED, TO_DRIVER, unpack, work_key
from rstar2_megatron.cluster.rollout_group import RolloutGroup
from rstar2_megatron.extension.user_code import UserCodeError
from rstar2_megatron.rollout.live_view import LiveView, ShowProgress
from rstar2_megatron.rollout.messages import EngineGone, WorkAnswer, WorkRequest
from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.progress import PhaseProgress
from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival
from rstar2_megatron.rollout.scheduling.work_queue import Slice
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.schema import RunnerSettings
from rstar2_megatron.trajectory import Group, Trajectory

logger = logging.getLogger(__name__)
_LAST_MESSAGES_S = 60.0
_CHECK_S = 1.0  # between two looks for workers that have died


class DriverChannel:
    """The driver's end of the rollout channel, which all phases of a run share, and the workers at its other ends."""

    def __init__(self, channel: Any, engines: RolloutGroup, reward: WorkerGroup, runner: RunnerSettings) -> None:
        self.rlinf = channel
        self.engines = engines
        self.inbox = ChannelReader(channel, TO_DRIVER)
        self.grading: PendingCall = reward.start("serve", channel)
        self.phases = 0
        self.lengths = LengthSurvival(runner.seq_length)
        self.show_progress: ShowProgress = lambda progress: None
        """Gets the progress of a running phase every few seconds."""
        self.check_services: Callable[[], None] = lambda: None
        """Raises when a service that the phases need was given up. Called once a second while a phase runs."""
        self._num_reward_workers = len(reward)
        self._stop_on_user_errors = runner.user_code_errors == "stop"
        self._said: set[str] = set()  # kinds of failures of the user's code

    def note_user_error(self, trajectory: Trajectory) -> None:
        """Say the first failure of each kind of the user's code. Raises UserCodeError with runner.user_code_errors=stop."""
        if self._stop_on_user_errors:
            raise UserCodeError(f"{trajectory.error} (problem {trajectory.query_id}; runner.user_code_errors=stop)")
        if trajectory.user_error not in self._said:
            self._said.add(trajectory.user_error)
            what = "a trajectory" if trajectory.usable else "dropped a trajectory"
            logger.warning("%s of problem %s: %s", what, trajectory.query_id, trajectory.error)

    def close(self) -> None:
        """End the loops of the reward workers."""
        for _ in range(self._num_reward_workers):
            self.rlinf.put(None, key=ENDED)


class PhaseEvents:
    """What a phase's owner hears of it. Every method does nothing unless it is overridden."""

    def handed_out(self, work: Sequence[Slice]) -> None:
        """An engine gets these slices."""

    def completed(self, number: int, group: Group) -> None:
        """Every trajectory of a group has ended and is graded. Said again of a group that was open again in between."""

    def reopened(self, numbers: Sequence[int]) -> None:
        """Complete groups have lost trajectories with a rollout worker, which others roll out again."""


class PhaseServer:
    """One running phase: handles incoming messages and answers work requests."""

    def __init__(self, channel: DriverChannel, phase: RolloutPhase, spec: RolloutSpec, label: str, events: PhaseEvents) -> None:
        self.phase = phase
        self.tail_since: float | None = None  # when an engine first had room and no work was left
        # when the last trajectory ended on its engine, before it was graded
        self.last_token = time.monotonic()
        self._channel = channel
        self._spec = spec
        self._number = spec.phase
        self._engines = channel.engines
        self._events = events
        self._pending_requests: list[WorkRequest] = []  # not answered yet
        self._gone: dict[int, str] = {}  # reasons by lost engine
        self._dead: set[int] = set()  # engines whose workers died; what they sent before counts no more
        self._generating: PendingCall | None = None
        self._checked = time.monotonic()
        ask = functools.partial(self._engines.start, "load")
        self._live = LiveView(ask, phase, PhaseProgress(label, channel.lengths), channel.show_progress)
        self.look_for_lost_workers()
        self._dead_before = len(self._dead)

    def start(self) -> None:
        """Start generation on every engine."""
        self._generating = self._engines.start("generate", self._channel.rlinf, self._spec)

    @property
    def engines_gone(self) -> bool:
        """Whether an engine was lost for the rest of the phase."""
        return bool(self._gone)

    def losses(self) -> dict[str, float]:
        return {
            "engines_gone": float(len(self._gone)),
            "workers_lost": float(len(self._dead) - self._dead_before),
            "worker_restarts": float(self._engines.restarts.total()),
        }

    def receive(self, timeout_s: float) -> None:
        """Take in the next message. Raises DeadlineExceeded when none arrives in time, and what `take_in` raises."""
        deadline = time.monotonic() + timeout_s
        message = None
        while message is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"nothing arrived on the channel within {timeout_s:.0f} s")
            message = self._channel.inbox.poll(min(_CHECK_S, left))
            self.take_in(message)

    def take_in(self, message: Any) -> None:
        """Handle a message, or None, and look for failures about once a second.

        Raises WorkerFailed, WorkerLost (a reward worker), NoEngineLeft, or what `DriverChannel.check_services` raises.
        """
        if message is not None:
            self.handle(message, time.monotonic())
        if time.monotonic() - self._checked >= _CHECK_S:
            self._checked = time.monotonic()
            self.look_for_lost_workers()
            self._channel.grading.check()
            self._channel.check_services()
        self._live.poll()

    def handle(self, message: Any, now: float) -> None:
        """Handle a WorkRequest, an EngineGone or a packed list of RolloutResult. Messages of an earlier phase are ignored.

        Raises NoEngineLeft when no engine is left, and what `DriverChannel.note_user_error` raises.
        """
        current = [
            one
            for one in (unpack(message) if isinstance(message, bytes) else [message])
            if one.phase == self._number and one.engine not in self._dead
        ]
        for one in current:
            if isinstance(one, WorkRequest):
                self._pending_requests.append(one)
            elif isinstance(one, EngineGone):
                self._lose(one.engine, one.reason)
            else:
                self.last_token = max(self.last_token, now - one.grading_s)
                if one.trajectory.user_error:
                    self._channel.note_user_error(one.trajectory)
                group = self.phase.ended(one.engine, one.group, one.trajectory, now)
                if group is not None:
                    self._events.completed(one.group, group)
        self.serve_pending(now)

    def serve_pending(self, now: float) -> None:
        """Answer the engines that wait for work, as far as there is any."""
        if self.phase.handed_out:
            return
        self._pending_requests = [request for request in self._pending_requests if not self._serve(request, now)]
        if self._pending_requests and not self.phase.queue.left and self.tail_since is None:
            self.tail_since = now

    def look_for_lost_workers(self) -> None:
        """Queue again what workers had that have died since the last look. Raises NoEngineLeft and WorkerFailed."""
        if self._generating is not None:
            self._generating.check()
        for engine in self.take_back():
            if engine not in self._gone:
                self._lose(engine, self._engines.lost[engine])
            self.serve_pending(time.monotonic())  # the others may have waited for nothing but this work

    def take_back(self) -> list[int]:
        """What workers had that have died since the last look counts as not rolled out. Returns their engines."""
        died = sorted(set(self._engines.lost) - self._dead)
        for engine in died:
            self._dead.add(engine)
            self._events.reopened(self.phase.lose_worker(engine))
        return died

    def _lose(self, engine: int, reason: str) -> None:
        self._gone[engine] = reason
        if len(self._gone) == len(self._engines):
            raise NoEngineLeft(f"no engine is left: {reason}")
        if engine not in self._engines.lost:  # that has been said
            logger.warning("engine %d is gone, the others take its work: %s", engine, reason)
        self.phase.queue.lose_engine(engine)
        self._pending_requests = [request for request in self._pending_requests if request.engine != engine]

    def _serve(self, request: WorkRequest, now: float) -> bool:
        work = self.phase.take(request.engine, request.room, now)
        if work:
            self._events.handed_out(work)
            self._answer(request.engine, work)
        return bool(work)

    def _answer(self, engine: int, work: list[Slice] | None) -> None:
        self._channel.rlinf.put(WorkAnswer(self._number, work), key=work_key(self._engines.names[engine]))

    def end(self, *, cut: bool, timeout_s: float) -> dict[int, dict[str, float]]:
        """End the phase: park what runs, or cut it, and collect the last trajectories. Returns the counters by engine.

        Raises what `take_in` raises, and DeadlineExceeded.
        """
        assert self._generating is not None
        deadline = time.monotonic() + timeout_s
        self.phase.handed_out = True
        for engine in self._engines.alive:
            self._answer(engine, None)
        if self.phase.num_open:
            self._engines.call("end_phase", cut, timeout_s=_LAST_MESSAGES_S)
        left = deadline - time.monotonic()
        workers = self._generating.result(left if self.phase.num_open else min(left, _LAST_MESSAGES_S))
        counters = dict(zip(self._generating.ranks, workers, strict=True))
        self.look_for_lost_workers()
        while self.phase.reported.total() < sum(sums["reported"] for sums in workers):
            self.receive(deadline - time.monotonic())
        return counters

    def close(self) -> None:
        """Clear the line that shows the progress."""
        self._live.close()
