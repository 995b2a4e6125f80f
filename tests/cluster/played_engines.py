"""Engines, and the driver's channel to them, played in one process: who ends what, and who dies, is up to a test."""

from __future__ import annotations

import itertools
import queue
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from rstar2_megatron.cluster.calls import WorkerLost
from rstar2_megatron.cluster.channel import pack
from rstar2_megatron.rollout.messages import RolloutResult, WorkAnswer, WorkRequest
from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival
from rstar2_megatron.trajectory import FinishReason, HeldTokens, Trajectory, VersionSpan


class PlayedEngines:
    """Two engines that end the oldest or, with `shuffled`, any trajectory when they are told, and park the rest.

    With `hold`, the tokens of ended trajectories stay with their engine, and a call on a dead one raises WorkerLost.
    """

    names = ("R:0", "R:1")
    hold = False
    away: Iterator[bool] = itertools.repeat(False)
    """Of each trajectory that ends, whether the judge is away: the infrastructure then spoils it."""

    def __init__(self, *, shuffled: bool) -> None:
        self.lost: dict[int, str] = {}
        self.restarts: Counter[int] = Counter()
        self.messages: queue.Queue[Any] = queue.Queue()
        self.running: list[tuple[int, RolloutResult]] = []
        self.version = 0
        self.phase = 0
        self.sent: Counter[int] = Counter()
        self.random = random.Random(0) if shuffled else None
        self.automatic = True
        self.dead: set[int] = set()

    @property
    def alive(self) -> list[int]:
        return [engine for engine in (0, 1) if engine not in self.lost]

    def __len__(self) -> int:
        return 2

    def kill(self, engine: int) -> None:
        """Whether the driver knows it is up to `lose`."""
        self.dead.add(engine)
        self.running = [(e, result) for e, result in self.running if e != engine]

    def lose(self, engine: int, reason: str) -> None:
        self.lost[engine] = reason

    def fetch(self, trajectories: Iterable[Trajectory]) -> None:
        """As `TokenSource.fetch`."""
        for t in trajectories:
            if t.held and t.held.worker in self.dead:
                raise WorkerLost("it died", t.held.worker)
            t.held = None

    def start(self, method: str, *args: Any) -> Any:
        if method == "generate":
            self.phase = args[1].phase
            self.sent.clear()
            for engine in self.alive:
                self.messages.put(WorkRequest(engine, self.phase, 4))
        return Call(self, method)

    def call(self, method: str, *args: Any, timeout_s: float) -> None:
        assert method == "end_phase" and args == (False,)
        for engine, result in self.running:
            self._send(engine, result, ended=False)
        self.running.clear()

    def put(self, answer: WorkAnswer, key: str) -> None:
        if answer.work is None:
            return
        engine = self.names.index(key.removeprefix("work "))
        for one in answer.work:
            for index in one.indices:
                t = one.parked.pop(index, None) or Trajectory(one.problem.query_id, index, [1])
                self._generate(t)
                self.running.append((engine, RolloutResult(engine, self.phase, one.group, one.problem, t)))
        self.messages.put(WorkRequest(engine, self.phase, 4))

    def _generate(self, t: Trajectory) -> None:
        count = len(t.response_ids)
        for name, value in (("response_ids", 5), ("loss_mask", 1), ("rollout_logprobs", -0.5)):
            setattr(t, name, [*getattr(t, name), value])
        t.version_spans.append(VersionSpan(count, count + 1, self.version))
        t.__post_init__()

    def _send(self, engine: int, result: RolloutResult, *, ended: bool) -> None:
        self.sent[engine] += 1
        if ended:
            self._generate(result.trajectory)
            if next(self.away):
                result.trajectory.finish_reason, result.trajectory.error = FinishReason.INFRASTRUCTURE, "no judge"
            else:
                result.trajectory.finish_reason = FinishReason.ANSWERED
                result.trajectory.reward = float(result.trajectory.rollout_index % 2)
            if self.hold:
                result.trajectory.held = HeldTokens(engine, 0, 1, 1, [], 0.0)
        self.messages.put(pack([result]))

    def poll(self, timeout_s: float) -> Any:
        try:
            return self.messages.get_nowait()
        except queue.Empty:
            if self.automatic and self.running:
                which = self.random.randrange(len(self.running)) if self.random else 0
                engine, result = self.running.pop(which)
                self._send(engine, result, ended=True)
            return None


class Call:
    def __init__(self, engines: PlayedEngines, method: str) -> None:
        self.engines, self.method = engines, method
        self.ranks = engines.alive

    def check(self) -> None: ...

    def result_if_ended(self) -> list[None]:
        return [None, None]

    def result(self, timeout_s: float) -> list[dict[str, float]]:
        self.ranks = self.engines.alive
        sums = [{"generated_tokens": float(self.engines.sent[e])} for e in self.ranks]
        if self.method == "generate":
            for e, one in zip(self.ranks, sums, strict=True):
                one["reported"] = float(self.engines.sent[e])
        return sums


def driver_channel(engines: PlayedEngines) -> Any:
    """As `DriverChannel` of these engines."""
    return SimpleNamespace(
        rlinf=SimpleNamespace(put=engines.put),
        engines=engines,
        inbox=SimpleNamespace(poll=engines.poll),
        grading=Call(engines, "serve"),
        phases=0,
        lengths=LengthSurvival(100),
        show_progress=lambda progress: None,
        check_services=lambda: None,
    )
