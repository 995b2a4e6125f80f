"""Admission rules of other frameworks, for comparison: only the simulator has them.

Written from their public documents and issues (2026-09). Each class says what of the rule is left out or assumed. All of them
see what this project's policies see: an engine report a second, lengths within a turn, work that waits in the common queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue, WaitingTrajectory
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget, KVReservation
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue

_LOOK_REPORTS = 5  # ThunderAgent's interval and prime-rl's poll, in engine reports (seconds)


class ThunderAgent(KVBudget):
    """ThunderAgent (arXiv 2602.13692) as SkyRL#1645 uses it: programs are paused at tool calls, the smallest first.

    A program counts with its current tokens and 100 more; shared prompts count for each (ThunderAgent#36). A new one starts if
    it fits. Every 5 s: waiting programs are resumed as far as they fit, those that have begun first, each kind by fewest
    tokens, where a program in a tool call counts half after each second; then, if the programs exceed the capacity, those in a
    tool call are paused until the rest fits, and if that is not enough, all others at the end of their turn.

    Assumed: a paused program comes back on its own engine. Theirs goes to the engine with the most room.
    """

    pause_above = pause_to = resume_to = 1.0  # shares of the capacity
    decays = True
    _buffer_tokens = 100

    def __init__(self, capacity_tokens: int, max_requests: int) -> None:
        super().__init__(capacity_tokens, max_requests)
        self._gate: float = capacity_tokens  # tokens that may be admitted before the next look
        self._acting: dict[Hashable, int] = {}  # reports in the present tool call
        self._reports = 0

    def has_room(self) -> bool:
        return self.running < self.max_requests and self._gate > self._buffer_tokens

    def room(self) -> int:
        each = self._buffer_tokens + max((r.prompt_tokens for r in self._reservations.values()), default=0)
        return max(1, min(self.max_requests - self.running, int(self._gate) // each))

    def observe(
        self, evictions: int, lengths: Mapping[Any, int], engine_tokens: int = 0, at_tools: Collection[Hashable] = ()
    ) -> None:
        super().observe(evictions, lengths, engine_tokens)
        self._reports += 1
        for key in self._leaving.intersection(at_tools) - self._away:
            self._free(key)  # its turn has ended
        self._acting = {key: self._acting.get(key, 0) + 1 for key in at_tools if key in self._reservations}
        if self._reports % _LOOK_REPORTS == 0:
            used = sum(self._tokens(key, decayed=self.decays) for key in self._reservations)
            self._gate = self.resume_to * self.capacity_tokens - used

    def preempt(self) -> list[Hashable]:
        used = sum(map(self._tokens, self._reservations))
        if self._reports % _LOOK_REPORTS or used <= self.pause_above * self.capacity_tokens:
            return []
        paused: list[Hashable] = []
        for key in sorted(self._acting, key=self._tokens):
            if used <= self.pause_to * self.capacity_tokens:
                return paused
            used -= self._tokens(key)
            self._free(key)
            paused.append(key)
        if used > self.pause_to * self.capacity_tokens:
            paused += [key for key in self._reservations if key not in self._leaving]
        self._leaving.update(paused)
        return paused

    def _tokens(self, key: Hashable, *, decayed: bool = False) -> float:
        share = 0.5 ** self._acting.get(key, 0) if decayed else 1.0
        return self._reservations[key].length * share + self._buffer_tokens

    def _free(self, key: Hashable) -> None:
        self._remove(key)
        self._leaving.add(key)
        self._away.add(key)

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        return reservation.length + self._buffer_tokens <= self._gate

    def _reserve(self, key: Hashable, reservation: KVReservation) -> None:
        super()._reserve(key, reservation)
        self._gate -= reservation.length + self._buffer_tokens


class DynamoThunderAgent(ThunderAgent):
    """Dynamo's router of the same kind (dynamo#9448), which verl-recipe#126 uses, with its default thresholds.

    It pauses above 95% of the capacity, down to 80%, and resumes up to 85%, where a program in a tool call counts in full. Left
    out: priorities in the engine's own queue for resumed requests, and the forced resume after 30 minutes.
    """

    pause_above, pause_to, resume_to = 0.95, 0.80, 0.85
    decays = False


class SmallestFirst(AdmissionQueue):
    """Paused programs come back by fewest tokens."""

    def requeue(self, parked: WaitingTrajectory) -> None:
        super().requeue(parked)
        self._preempted = deque(sorted(self._preempted, key=lambda admission: admission.length))


class ShortestPrompts(WorkQueue):
    """New programs that did not fit at once start by fewest tokens, so by the length of their prompt (ThunderAgent#46)."""

    def __init__(self, num_engines: int, prompt_tokens: Mapping[int, int]) -> None:
        super().__init__("thunderagent", num_engines, 1)
        self._prompts = prompt_tokens

    def _choose(self, candidates: list[int], engine: int, now: float) -> int:
        return min(candidates, key=self._prompts.__getitem__) if now >= _LOOK_REPORTS else candidates[0]


class InFlightCap:
    """prime-rl's cap of all trajectories in flight (#3307 with #3556), by the KV usage of the fullest engine.

    It begins with what surely fits. Each trajectory that ends lets it grow, by 1.2 a turnover at no usage and not at 80%, if
    the cap binds and no engine has requests waiting at two polls in a row. Above 80% it becomes in flight x 70% / usage;
    above 90% the youngest beyond it are cancelled too; then 6 polls pass. After 6 polls with more than half as many requests
    waiting as running it becomes 90% of those in flight, after an eviction 80%, and the youngest are cancelled; nothing more is
    cut until those in flight have come down.

    Assumed: a poll every 5 s; a cancelled trajectory keeps its tokens (theirs begins again); trajectories go to the engine with
    the fewest. Left out: the larger cut where overload comes back within 6 polls.
    """

    soft, hard, target, turnover_growth = 0.8, 0.9, 0.7, 1.2
    binding, wait_polls, many_waiting = 0.9, 6, 0.5

    def __init__(self) -> None:
        self.budgets: list[PrimeRL] = []
        self.cap = 0.0
        self.growth = 1.0
        self._reports = self._cooldown = self._overloaded = 0
        self._draining = False

    @property
    def in_flight(self) -> int:
        return sum(budget.running for budget in self.budgets)

    def ended(self) -> None:
        in_flight = self.in_flight + 1
        if in_flight >= self.binding * int(self.cap):
            self.cap *= self.growth ** (1 / in_flight)

    def reported(self) -> None:
        self._reports += 1
        if self._reports % (_LOOK_REPORTS * len(self.budgets)) == 0:
            self._poll()

    def _poll(self) -> None:
        usage = max(budget.usage for budget in self.budgets)
        waiting = sum(budget.waiting for budget in self.budgets)
        waited = any(budget.waiting and budget.waited for budget in self.budgets)
        evictions = sum(budget.evictions for budget in self.budgets)
        in_flight = self.in_flight
        for budget in self.budgets:
            budget.waited = budget.waiting
            budget.usage, budget.waiting, budget.evictions = 0.0, 0, 0  # an engine that is done reports no more
        many = waiting > self.many_waiting * (in_flight - waiting) > 0
        self._overloaded = self._overloaded + 1 if many else 0
        overload = self._overloaded >= self.wait_polls
        if self._draining and in_flight <= self.cap and not (evictions or overload):
            self._draining = False
        self._cooldown = max(0, self._cooldown - 1)
        clear = not (evictions or waited or usage > self.soft or self._draining)
        self.growth = 1 + (self.turnover_growth - 1) * (1 - usage / self.soft) if clear else 1.0
        if self._draining:
            return
        if evictions or overload:
            self._overloaded, self._draining = 0, True
            self._lower(in_flight * (0.9 if overload else 0.8), cancel=True)
        elif usage > self.soft and not self._cooldown:
            self._cooldown = self.wait_polls
            self._lower(in_flight * self.target / usage, cancel=usage > self.hard)

    def _lower(self, cap: float, *, cancel: bool) -> None:
        self.cap = max(1.0, min(self.cap, int(cap)))
        excess = self.in_flight - int(self.cap) if cancel else 0
        for budget in self.budgets:  # they hold about as many each
            budget.cancel = max(0, excess * budget.running // max(1, self.in_flight))


class PrimeRL(KVBudget):
    """One engine's part of `InFlightCap`."""

    def __init__(self, capacity_tokens: int, max_requests: int, shared: InFlightCap) -> None:
        super().__init__(capacity_tokens, max_requests)
        self.shared = shared
        self.usage = 0.0
        self.waiting = self.waited = self.evictions = self.cancel = 0
        shared.budgets.append(self)

    def has_room(self) -> bool:
        return self.running < self.max_requests and self.shared.in_flight < int(self.shared.cap or 1)

    def room(self) -> int:
        return 1

    def release(self, key: Hashable, *, finished: bool = True) -> None:
        super().release(key, finished=finished)
        if finished:
            self.shared.ended()

    def observe(
        self, evictions: int, lengths: Mapping[Any, int], engine_tokens: int = 0, at_tools: Collection[Hashable] = ()
    ) -> None:
        super().observe(evictions, lengths, engine_tokens)
        self.usage = engine_tokens / self.capacity_tokens
        self.waiting = max(0, self.running - len(lengths) - len(at_tools))
        self.evictions += evictions
        self.shared.reported()

    def preempt(self) -> list[Hashable]:
        youngest = [key for key in self._reservations if key not in self._leaving][::-1][: self.cancel]
        self.cancel = 0
        self._leaving.update(youngest)
        return youngest

    def _reserve(self, key: Hashable, reservation: KVReservation) -> None:
        super()._reserve(key, reservation)
        if not self.shared.cap:
            self.shared.cap = len(self.shared.budgets) * self.capacity_tokens / reservation.max_tokens

    def _fits(self, reservation: KVReservation, shared: int) -> bool:
        return self.shared.in_flight < int(self.shared.cap)


PEERS = ("thunderagent", "thunderagent_dynamo", "prime_rl")
_THUNDER_AGENTS = {"thunderagent": ThunderAgent, "thunderagent_dynamo": DynamoThunderAgent}


def peer_budgets(policy: str, num_engines: int, capacity_tokens: int, max_requests: int) -> Sequence[KVBudget]:
    """A budget for each engine. Raises KeyError for an unknown policy."""
    if policy == "prime_rl":
        cap = InFlightCap()
        return [PrimeRL(capacity_tokens, max_requests, cap) for _ in range(num_engines)]
    return [_THUNDER_AGENTS[policy](capacity_tokens, max_requests) for _ in range(num_engines)]


def peer_queue(policy: str, num_engines: int, prompt_tokens: Mapping[int, int]) -> WorkQueue:
    """The common queue; `prompt_tokens` by group."""
    if policy == "prime_rl":
        return WorkQueue("least_requests", num_engines, 1)
    return ShortestPrompts(num_engines, prompt_tokens)


def peer_admission(policy: str) -> type[AdmissionQueue]:
    return AdmissionQueue if policy == "prime_rl" else SmallestFirst
