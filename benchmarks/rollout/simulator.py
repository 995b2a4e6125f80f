"""One rollout phase in simulated time: the objects that run in production, on a model of SGLang (`engine_model`)."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.rollout.engine_model import EngineModel, Request
from benchmarks.rollout.peers import PEERS, ThunderAgent, peer_admission, peer_budgets, peer_queue
from benchmarks.rollout.traces import Trace
from rstar2_megatron.rollout.phase import OpenGroup, RolloutPhase
from rstar2_megatron.rollout.scheduling.adaptive_budget import make_budget
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue, WaitingTrajectory
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.settings.planning.estimates import EngineSpeed
from rstar2_megatron.trajectory import FinishReason, Problem, Trajectory

_REPORT_S = 1.0  # between an engine's reports, as in production
_ASK_S = 0.015  # from an engine's request for work to the driver's answer


@dataclass(frozen=True)
class Cluster:
    """Engines of one kind."""

    engines: int
    speed: EngineSpeed
    kv_tokens: int
    max_requests: int


@dataclass
class Result:
    """Figures of one phase under one policy."""

    makespan_s: float
    idle_share: float
    recompute_share: float
    preemptions: int
    evictions: int
    evicted_tokens: int
    recomputed_tokens: int
    prefix_hit_rate: float
    p50_s: float
    p99_s: float
    tail_s: float  # from the end of the first engine that has nothing left to the end of the phase
    wait_s_by_prompt: list[float]  # mean seconds from the phase's begin to the first prefill; quarters, shortest prompts first


@dataclass(slots=True)
class _Life:
    trace: Trace
    turn: int = 0
    length: int = 0
    admitted_at: float | None = None
    generated: int = 0  # of the turn that a preemption interrupted
    preempted: bool = False


class Simulator:
    """One phase: every trace once, on `cluster` under `policy`.

    `lockstep` is the paper's baseline (arXiv 2508.20722, section 3.2), for `static`: an engine gets its share at
    once, its trajectories take their turns together, each round waits for the slowest turn and the slowest call, and
    a full cache costs half of the running requests their tokens.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        cluster: Cluster,
        policy: str,
        slice_size: int,
        budgets: Sequence[KVBudget] | None = None,
        *,
        lockstep: bool = False,
    ) -> None:
        self.cluster = cluster
        self.lockstep = lockstep
        self.policy = policy
        self.traces = {(t.group, t.index): t for t in traces}
        sizes = Counter(t.group for t in traces)
        prompts = {t.group: t.prompt_tokens for t in traces}
        of_peer = policy in PEERS
        queue = peer_queue(policy, cluster.engines, prompts) if of_peer else WorkQueue(policy, cluster.engines, slice_size)
        self.phase = RolloutPhase(queue, 0)
        self.phase.add([OpenGroup(Problem(str(group), [], []), size) for group, size in sorted(sizes.items())])
        self.engines = [Engine(self, number, budget) for number, budget in enumerate(budgets or make_budgets(cluster, policy))]
        self.seconds: list[float] = []

    @property
    def over(self) -> bool:
        """Whether engines that have nothing to do are done."""
        return self.phase.over

    def ended(self, engine: int, trace: Trace, now: float) -> None:
        """A trajectory has ended."""
        self.phase.ended(engine, trace.group, _ended(trace), now)

    def run(self) -> Result:
        order = itertools.count()
        events = [(0.0, next(order), engine) for engine in self.engines]
        while events:
            now, _, engine = heapq.heappop(events)
            wake = engine.step(now)
            if wake is not None:
                heapq.heappush(events, (wake, next(order), engine))
        return self._result()

    def _result(self) -> Result:
        if len(self.seconds) != len(self.traces):
            raise RuntimeError(f"{len(self.traces) - len(self.seconds)} trajectories never ended under {self.policy}")
        makespan = max(engine.ended_at for engine in self.engines)
        total = makespan * len(self.engines)
        counters = [engine.model.counters for engine in self.engines]
        cached = sum(c.cached_tokens for c in counters)
        seconds = np.array(self.seconds)
        started = {key: at for engine in self.engines for key, at in engine.model.started.items()}
        by_prompt = sorted(started, key=lambda key: self.traces[key >> 20, key & 0xFFFFF].prompt_tokens)
        waits = [[started[key] for key in quarter] for quarter in np.array_split(by_prompt, 4)]
        return Result(
            makespan_s=round(makespan, 2),
            idle_share=round(1 - sum(c.busy_s for c in counters) / total, 4),
            recompute_share=round(sum(c.recompute_s for c in counters) / total, 4),
            preemptions=sum(engine.preemptions for engine in self.engines),
            evictions=sum(c.evictions for c in counters),
            evicted_tokens=sum(c.evicted_tokens for c in counters),
            recomputed_tokens=sum(c.recomputed_tokens for c in counters),
            prefix_hit_rate=round(cached / (cached + sum(c.prefill_tokens for c in counters)), 4),
            p50_s=round(float(np.quantile(seconds, 0.5)), 2),
            p99_s=round(float(np.quantile(seconds, 0.99)), 2),
            tail_s=round(makespan - min(engine.ended_at for engine in self.engines), 2),
            wait_s_by_prompt=[round(float(np.mean(quarter)), 2) if quarter else 0.0 for quarter in waits],
        )


def make_budgets(cluster: Cluster, policy: str) -> Sequence[KVBudget]:
    if policy in PEERS:
        return peer_budgets(policy, cluster.engines, cluster.kv_tokens, cluster.max_requests)
    return [make_budget(policy, cluster.kv_tokens, cluster.max_requests) for _ in range(cluster.engines)]


class Engine:
    """What a rollout worker does, in simulated time."""

    def __init__(self, simulator: Simulator, number: int, budget: KVBudget) -> None:
        self.simulator = simulator
        self.number = number
        admission = peer_admission(simulator.policy) if simulator.policy in PEERS else AdmissionQueue
        self.scheduler = admission(budget)
        cluster = simulator.cluster
        self.model = EngineModel(
            cluster.speed, cluster.kv_tokens, cluster.max_requests, evict_share=0.5 if simulator.lockstep else 0.0
        )
        self.lives: dict[int, _Life] = {}
        self.tools: list[tuple[float, int]] = []  # when a tool's answer arrives
        self.round: list[tuple[float, int]] = []  # in lockstep: tools of those that have ended their turn
        self.next_report = _REPORT_S
        self.answer_at: float | None = None  # when the driver answers our request for work
        self.evictions_seen = 0
        self.preemptions = 0
        self.ended_at = 0.0

    def step(self, now: float) -> float | None:
        """Do the next thing; returns when to be called again, None when there will be nothing."""
        self.model.now = max(self.model.now, now)
        now = self.model.now
        if self.round and self.model.idle and not self.tools:
            slowest = now + max(self.round)[0]  # the batch of calls, then the next turn of all
            self.tools, self.round = [(slowest, key) for _, key in self.round], []
        while self.tools and self.tools[0][0] <= now:
            self._answered(heapq.heappop(self.tools)[1])
        if now >= self.next_report:
            self._report(now)
        self._pull(now)
        until = self.next_report
        if self.tools:
            until = min(until, self.tools[0][0])
        if self.answer_at is not None:
            until = min(until, self.answer_at)
        if self.model.idle:
            if not self.lives and self.simulator.over:
                return None
            return until
        self.model.advance(until)
        for request in self.model.finished:
            self._turn_ended(request)
        self.model.finished.clear()
        return self.model.now

    def _pull(self, now: float) -> None:
        if self.answer_at is not None and now >= self.answer_at:
            slices = self.simulator.phase.take(self.number, self.scheduler.budget.room(), now)
            for work in slices:
                self.scheduler.add([self._waiting(work.group, index) for index in work.indices])
            # without an answer the request stays open: look again soon
            self.answer_at = None if slices or not self.simulator.phase.queue.left else now + _ASK_S
        for admission in self.scheduler.admit():
            key = admission.key
            assert isinstance(key, int)
            if self.lives[key].admitted_at is None:
                self.lives[key].admitted_at = now
            self._submit(key)
        if self.answer_at is None and self.scheduler.wants_work() and self.simulator.phase.queue.left:
            self.answer_at = now + _ASK_S

    def _waiting(self, group: int, index: int) -> WaitingTrajectory:
        trace = self.simulator.traces[group, index]
        key = group << 20 | index
        self.lives[key] = _Life(trace, 0, trace.prompt_tokens)
        return self._request_for(key)

    def _request_for(self, key: int) -> WaitingTrajectory:
        life = self.lives[key]
        trace = life.trace
        longest = trace.prompt_tokens + trace.max_response_tokens
        return WaitingTrajectory(key, trace.group, trace.prompt_tokens, longest, life.length)

    def hand_over(self, key: int) -> _Life:
        """Give a trajectory away, with its tokens."""
        life = self.lives.pop(key)
        generated = self.model.abort(key) or 0
        life.length += generated
        life.generated += generated
        life.preempted = False
        waiting = self.scheduler.withdraw()
        self.scheduler.add(admission for admission in waiting if admission.key != key)
        if all(admission.key != key for admission in waiting):
            self.scheduler.budget.release(key, finished=False)
        return life

    def take_over(self, key: int, life: _Life) -> None:
        """Queue a trajectory of another engine."""
        self.lives[key] = life
        self.scheduler.add([self._request_for(key)])

    def _submit(self, key: int) -> None:
        life = self.lives[key]
        trace = life.trace
        left = trace.prompt_tokens + trace.max_response_tokens - life.length
        generate = trace.turns[life.turn].generated_tokens - life.generated
        self.model.submit(Request(key, trace.group, trace.prompt_tokens, life.length, generate, left))

    def _turn_ended(self, request: Request) -> None:
        key, now = request.key, self.model.now
        life = self.lives[key]
        turn = life.trace.turns[life.turn]
        life.length += turn.generated_tokens - life.generated
        life.generated = 0
        life.turn += 1
        if life.turn < len(life.trace.turns):
            life.length += turn.tool_tokens
            self.scheduler.budget.set_length(key, life.length)
            if self.simulator.lockstep:
                self.round.append((turn.tool_seconds, key))
            else:
                heapq.heappush(self.tools, (now + turn.tool_seconds, key))
            return
        self.scheduler.budget.set_length(key, life.length)
        self.scheduler.budget.release(key)
        self.simulator.ended(self.number, life.trace, now)
        self.model.forget(key)
        assert life.admitted_at is not None
        self.simulator.seconds.append(now - life.admitted_at)
        self.ended_at = now
        del self.lives[key]

    def _report(self, now: float) -> None:
        evictions = self.model.counters.evictions
        self.scheduler.budget.observe(
            evictions - self.evictions_seen, self.model.lengths(), self.model.used_tokens(), [key for _, key in self.tools]
        )
        self.evictions_seen = evictions
        self.next_report = now + _REPORT_S
        for key in self.scheduler.budget.preempt():
            assert isinstance(key, int)
            self._preempt(key)

    def _preempt(self, key: int) -> None:
        """Park a trajectory with its tokens; one that waits for its tool when the answer is there.

        ThunderAgent lets it end its turn and its call first.
        """
        life = self.lives[key]
        life.preempted = True
        generated = None if isinstance(self.scheduler.budget, ThunderAgent) else self.model.abort(key)
        if generated is not None:
            life.length += generated
            life.generated += generated
            self._requeue(key)

    def new_weights(self, until: float) -> None:
        """Interrupt every request; it goes on at `until` from its tokens, which are computed again."""
        for key, generated in self.model.interrupt().items():
            life = self.lives[key]
            life.length += generated
            life.generated += generated
            self._submit(key)
        self.model.now = max(self.model.now, until)

    def _answered(self, key: int) -> None:
        if self.lives[key].preempted:
            self._requeue(key)
        else:
            self._submit(key)

    def _requeue(self, key: int) -> None:
        self.preemptions += 1
        self.lives[key].preempted = False
        self.scheduler.budget.set_length(key, self.lives[key].length)
        self.scheduler.requeue(self._request_for(key))


def _ended(trace: Trace) -> Trajectory:
    return Trajectory(str(trace.group), trace.index, finish_reason=FinishReason.ANSWERED)
