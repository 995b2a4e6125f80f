"""Rolls out while the actor trains: one phase that goes on from step to step, and the buffer of its complete groups.

A thread of the driver serves the engines, so that they never wait for the step. The phase is parked for a checkpoint, for an
evaluation, and to take in a restarted engine; then it goes on from the same tokens. A weight sync interrupts generation at a
token, and it goes on with the new weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rstar2_megatron.cluster.calls import DeadlineExceeded, NoEngineLeft, WorkerLost
from rstar2_megatron.cluster.phases.server import DriverChannel, PhaseEvents, PhaseServer
from rstar2_megatron.cluster.tokens import TokenSource
from rstar2_megatron.data.loader import ProblemLoader
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.rollout.dropped import check_dropped
from rstar2_megatron.rollout.phase import RolloutPhase, Unfinished
from rstar2_megatron.rollout.scheduling.staleness import StalenessSchedule
from rstar2_megatron.rollout.scheduling.work_queue import Slice, WorkQueue
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.rollout.stats import StatsByStep, combine
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import Group, Problem, Trajectory, oldest_version

logger = logging.getLogger(__name__)
_POLL_S = 0.2
_JOIN_S = 30.0  # the thread may be in a call of Ray


class AsynchronousSource(PhaseEvents):
    """Source of the groups of a run with `algorithm.max_staleness`: a step takes the next batch of the buffer.

    Tokens may be that many weight versions older than the weights that they train. Every public method belongs to the driver's
    main thread. `rejected` says of a complete group whether resampling rejects it; another problem then takes its place.
    """

    def __init__(
        self, channel: DriverChannel, tokens: TokenSource, settings: Settings, rejected: Callable[[Group], bool]
    ) -> None:
        self._channel, self._tokens, self._settings, self._rejected = channel, tokens, settings, rejected
        self._timeout_s = settings.runner.step_timeout_s
        self._spec = RolloutSpec.training(settings)
        self._step_size = settings.data.rollout_batch_size * settings.algorithm.group_size  # trajectories
        self.schedule = self._new_schedule(version=0)
        self._loader: ProblemLoader | None = None
        self._used_up: DataError | None = None  # the loader has no more problems
        self._left = Unfinished()  # what is not in a running phase
        self._buffer: dict[int, Group] = {}  # complete groups by number
        self._server: PhaseServer | None = None
        self._next_number = 0
        self._dropped = 0  # trajectories that became too old, in this step
        self._lost: list[Group] = []  # groups that the infrastructure spoiled since the last usable trajectory
        self._by_step = StatsByStep()
        self._losses: dict[str, float] = {}  # of the phase that was paused last
        # guards all of this while the thread runs; waited on for complete groups
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: BaseException | None = None

    def _new_schedule(self, version: int) -> StalenessSchedule:
        settings = self._settings
        return StalenessSchedule(
            settings.data.rollout_batch_size, settings.algorithm.max_staleness, version, settings.runner.max_steps
        )

    # ------------------------------------------------------------------------------------------- steps

    def _start(self, loader: ProblemLoader) -> None:
        """Roll out the loader's problems from now on."""
        self._loader = loader
        rollout = self._settings.rollout
        self._channel.phases += 1
        queue = WorkQueue(rollout.scheduler, len(self._channel.engines), rollout.slice_size, endless=True)
        phase = RolloutPhase(queue, self._spec.samples, next_number=self._next_number)
        spec = replace(self._spec, phase=self._channel.phases)
        self._server = PhaseServer(self._channel, phase, spec, "rollout", self)
        unfinished, self._left.open = self._left.open, []
        for group in unfinished:
            (number,) = phase.add([group])
            self.schedule.add(number, group.oldest_version)
        self._server.start()
        self._admit()
        self._stopping, self._failure = False, None
        self._thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
        self._thread.start()

    def next(self, step: int, loader: ProblemLoader) -> list[Group]:
        """Wait for the next batch; returns its groups behind the groups rejected since the last batch.

        Begins to roll out the loader's problems, unless that is under way. Raises DeadlineExceeded after
        `runner.step_timeout_s`, the failures of `PhaseServer.take_in`, DataError when the problems are used up, and
        TooManyDropped for a batch that is spoiled or when nothing but spoiled groups arrives.
        """
        if self._server is None:
            self._start(loader)
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while True:
                self._raise_failure()  # before a batch is taken: workers that have died held its tokens
                if self._server is not None:
                    self._server.look_for_lost_workers()  # since the thread has looked
                if (numbers := self.schedule.take()) is not None:
                    break
                # Spoiled groups are rejected and replaced, so without this check the wait would never end.
                check_dropped(self._lost, self._settings.rollout.max_dropped_share, self._step_size)
                if self._used_up is not None and not self._num_open:
                    raise self._used_up
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"no batch of {self.schedule.batch} groups within {self._timeout_s:.0f} s: "
                        f"{self.schedule.num_complete} complete, {self._num_open} open"
                    )
                self._changed.wait(_POLL_S)
            groups = [self._buffer.pop(number) for number in numbers]
            for number in numbers:
                self._forget(number)
            check_dropped(groups, self._settings.rollout.max_dropped_share)
            rejected, self._left.rejected = self._left.rejected, []
            self._drop_overdue()
            self._admit()  # a step more has room
        for trajectory in (t for group in groups for t in group.usable):
            self._channel.lengths.add(trajectory.response_tokens)
        return [*rejected, *groups]

    def new_weights(self, version: int) -> None:
        """Every engine generates with weights `version` now."""
        with self._changed:
            self.schedule.new_weights(version)
            self._admit()

    def stats(self, seconds: dict[str, float]) -> dict[str, float]:
        """Counters of the engines, and those of the driver, since the last call."""
        sums: dict[int, dict[str, float]] = {}
        if self._server is not None:
            call = self._channel.engines.start("counters")
            results = call.result(self._timeout_s)
            sums = {rank: one for rank, one in zip(call.ranks, results, strict=True) if one}
        with self._changed:
            dropped, self._dropped = self._dropped, 0
            driver = {
                "buffer_groups": float(self.schedule.num_complete),
                "open_groups": float(self._num_open + len(self._left.open)),
                "dropped_stale": float(dropped),
                **(self._losses if self._server is None else self._server.losses()),
            }
        engines = self._by_step.step_ended(sums)
        counted = combine(engines, seconds["step"]) if engines else {}
        return {
            **counted,
            **driver,
            "trainer_idle_seconds": seconds["rollout"],
            "engine_idle_seconds": counted.get("idle_share", 0.0) * len(engines) * seconds["step"],
        }

    @property
    def engines_gone(self) -> bool:
        """Whether an engine takes no more part until the next `pause`."""
        return self._server is not None and self._server.engines_gone

    # ------------------------------------------------------------------------------------ interruptions

    def before_sync(self) -> None:
        if self.engines_gone:
            self.pause()  # the next phase begins with every engine that runs

    def pause(self) -> None:
        """Park everything, after running tool calls, and bring all tokens here. `next` goes on.

        When the last engine is lost, what it had is rolled out again: the next sync starts it, or ends the run.
        """
        if self._server is None:
            return
        self._stop_thread()
        server = self._server
        try:
            self._raise_failure()
            with self._changed:
                self._by_step.phase_ended(server.end(cut=False, timeout_s=self._timeout_s))
                self._fetch_tokens(server)
        except NoEngineLeft:
            self.no_engine_left()
        else:
            self._leave(server)

    def no_engine_left(self) -> None:
        """After NoEngineLeft: what the engines had is rolled out again after the next call of `next`."""
        if self._server is not None:
            self._stop_thread()
            with self._changed:
                self._server.take_back()
            self._leave(self._server)

    def _leave(self, server: PhaseServer) -> None:
        server.close()
        self._losses = server.losses()
        self._server = None
        self._next_number = server.phase.next_number
        for number, group in server.phase.open_groups.items():
            self.schedule.remove(number)
            self._left.open.append(group)

    def _fetch_tokens(self, server: PhaseServer) -> None:
        """Bring the tokens of all groups here. What a dead worker held is rolled out again, as at any other moment."""
        while True:
            opened = [t for group in server.phase.open_groups.values() for t in group.ended.values()]
            complete = [t for group in self._buffer.values() for t in group.trajectories]
            try:
                self._tokens.fetch([*opened, *complete])
                break
            except WorkerLost as error:
                self._channel.engines.lose(error.rank, str(error))
                server.look_for_lost_workers()
        self._tokens.fetch_complete(self._left.rejected)  # these are only counted

    def state(self) -> dict[str, Any]:
        """For a checkpoint: pauses, and returns what is not trained on."""
        self.pause()
        return {"unfinished": replace(self._left, complete=list(self._buffer.values()))}

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Go on from a checkpoint of weights `version`, also of a synchronous run.

        A trajectory that had a live interpreter starts from its prompt. What `algorithm.max_staleness` no longer allows is
        dropped, counted, and rolled out again.
        """
        self.schedule = self._new_schedule(version)
        unfinished = state.get("unfinished") or Unfinished(open=state["carried"])
        self._left = replace(unfinished, complete=[])
        bound = version - self.schedule.max_staleness
        for group in self._left.open:
            group.parked = {index: t for index, t in group.parked.items() if not t.session}
            for part in (group.parked, group.ended):
                for index in [i for i, t in part.items() if _is_older(t, bound)]:
                    del part[index]
                    self._dropped += 1
        for whole in unfinished.complete:
            self._completed(self._next_number, whole)
            self._next_number += 1

    def close(self) -> None:
        """End the thread. The engines are left as they are."""
        self._stop_thread()
        if self._server is not None:
            self._server.close()

    # ----------------------------------------------------------------------------------------- events

    def handed_out(self, work: Sequence[Slice]) -> None:
        for one in work:
            self.schedule.begin(one.group)

    def completed(self, number: int, group: Group) -> None:
        self._lost = [] if group.usable else [*self._lost, group]
        if self._rejected(group):
            self.schedule.remove(number)
            self._forget(number)
            self._left.rejected.append(group)
        else:
            self._completed(number, group)
        self._admit()
        self._changed.notify_all()

    def reopened(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._buffer.pop(number)
            self.schedule.reopen(number)

    def _completed(self, number: int, group: Group) -> None:
        oldest = oldest_version(group.usable)
        self.schedule.complete(number, self.schedule.engine_version if oldest is None else oldest)
        self._buffer[number] = group
        self._drop_overdue()

    def _drop_overdue(self) -> None:
        for stale in self.schedule.overdue():
            dropped = self._buffer.pop(stale)
            logger.warning("a group of problem %s is too old to be trained on", dropped.problem.query_id)
            self.schedule.remove(stale)
            self._forget(stale)
            self._dropped += len(dropped.usable)
            self._left.again.append(dropped.problem)

    def _admit(self) -> None:
        """Let as many problems begin as can be trained on in time."""
        server = self._server
        if server is None or server.phase.handed_out:
            return
        if count := self.schedule.room:
            for problem in self._take_problems(count):
                self._left.begun += 1
                (number,) = server.phase.add_problems([problem], self._left.begun)
                self.schedule.add(number)
        server.serve_pending(time.monotonic())

    def _take_problems(self, count: int) -> list[Problem]:
        again = self._left.again
        problems, again[:] = again[:count], again[count:]
        assert self._loader is not None
        try:
            while count > len(problems) and self._used_up is None:
                problems += self._loader.take(1)
        except DataError as error:
            self._used_up = error
        return problems

    # ----------------------------------------------------------------------------------------- thread

    def _serve(self) -> None:
        server = self._server
        assert server is not None
        try:
            while not self._stopping:
                message = self._channel.inbox.poll(_POLL_S)
                with self._changed:
                    server.take_in(message)
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _stop_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping = True
            thread.join(_JOIN_S)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def _num_open(self) -> int:
        return 0 if self._server is None else self._server.phase.num_open

    def _forget(self, number: int) -> None:
        """The phase that rolled a group out needs to know it no longer. One from before the phase is not known to it."""
        if self._server is not None:
            self._server.phase.forget(number)


def _is_older(trajectory: Trajectory, version: int) -> bool:
    oldest = trajectory.oldest_version
    return oldest is not None and oldest < version
