"""Counters of one rollout phase, summed over trajectories and workers."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from rstar2_megatron.rollout.engine.protocol import EngineReport
from rstar2_megatron.trajectory import Group, ToolCall, Trajectory

_OF_RUN = "engine_restarts"
_COUNTERS = ("tool_calls", "endings", "tool")


@dataclass(slots=True)
class RolloutStats:
    """Every field is a sum, so that the stats of several workers can be added. `combine` computes the ratios."""

    trajectories: int = 0
    generated_tokens: int = 0
    tool_tokens: int = 0  # tokens of tool responses and turn headers
    prefill_tokens: int = 0  # prompt tokens the engines had to compute
    cached_tokens: int = 0  # prompt tokens found in their KV caches
    retractions: int = 0  # evictions of a running request, which is then computed again
    preemptions: int = 0  # trajectories parked to free KV cache and resumed later
    engine_retries: int = 0  # turns generated again after an engine was lost
    parked: int = 0  # trajectories carried into the next step
    generate_seconds: float = 0.0  # sum over trajectories
    tool_seconds: float = 0.0
    admission_seconds: float = 0.0  # waiting for room in the KV budget
    engine_busy_seconds: float = 0.0  # while at least one request runs
    kv_used_tokens: float = 0.0  # sum over engine reports, as the next three
    kv_capacity_tokens: float = 0.0
    engine_running: float = 0.0
    engine_waiting: float = 0.0
    reports: int = 0
    tool_calls: Counter[str] = field(default_factory=Counter)  # by outcome
    tool: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # calls, errors and seconds by tool
    endings: Counter[str] = field(default_factory=Counter)  # by finish reason
    _at_engine: int = 0
    _busy_since: float = 0.0

    def finish(self, trajectory: Trajectory) -> None:
        """Count a trajectory that ended or was parked. Tokens of a parked one are counted when it ends."""
        if trajectory.finish_reason is None:
            self.parked += 1
            return
        self.trajectories += 1
        self.generated_tokens += trajectory.num_trained_tokens
        self.tool_tokens += trajectory.response_tokens - trajectory.num_trained_tokens
        self.tool_calls.update(str(call.outcome) for call in trajectory.tool_calls)
        self.endings[str(trajectory.finish_reason)] += 1

    def add_call(self, call: ToolCall) -> None:
        """Count a call of a known tool. Errors are those of the model."""
        self.tool[f"{call.name}/calls"] += 1
        self.tool[f"{call.name}/errors"] += call.outcome.is_model_error
        self.tool[f"{call.name}/seconds"] += call.seconds

    @contextlib.contextmanager
    def at_engine(self) -> Iterator[None]:
        """While the engine has a request."""
        begun = time.monotonic()
        if self._at_engine == 0:
            self._busy_since = begun
        self._at_engine += 1
        try:
            yield
        finally:
            self._at_engine -= 1
            ended = time.monotonic()
            self.generate_seconds += ended - begun
            if self._at_engine == 0:
                self.engine_busy_seconds += ended - self._busy_since

    def observe(self, report: EngineReport) -> None:
        """Add one report of the engine's load (about one a second)."""
        self.reports += 1
        self.kv_used_tokens += report.used_tokens
        self.kv_capacity_tokens += report.max_total_tokens
        self.engine_running += report.running_requests
        self.engine_waiting += report.waiting_requests

    def sums(self) -> dict[str, float]:
        """Flat values, with one key per entry of a counter."""
        values = {
            f.name: float(getattr(self, f.name)) for f in fields(self) if f.name not in _COUNTERS and not f.name.startswith("_")
        }
        if self._at_engine:
            values["engine_busy_seconds"] += time.monotonic() - self._busy_since
        for counter in _COUNTERS:
            values |= {f"{counter}/{name}": float(n) for name, n in sorted(getattr(self, counter).items())}
        return values


class StatsByStep:
    """Splits counters that grow through a phase into steps; a phase may end within a step.

    `engine_restarts` grows through the run, and stays as it is.
    """

    def __init__(self) -> None:
        self._before: dict[int, Mapping[str, float]] = {}  # by engine
        self._of_ended: dict[int, Counter[str]] = {}  # of phases that ended in this step

    def phase_ended(self, sums: Mapping[int, Mapping[str, float]]) -> None:
        """sums: all counters of the phase, by engine."""
        for engine, growth in self._growth(sums).items():
            self._of_ended.setdefault(engine, Counter()).update(growth)
        self._before = {}

    def step_ended(self, sums: Mapping[int, Mapping[str, float]]) -> list[dict[str, float]]:
        """The growth of this step, an entry for each engine. sums: counters of the phase under way."""
        growths = self._growth(sums)
        steps = []
        for engine in sorted({*growths, *self._of_ended}):
            total = Counter(growths.get(engine, {}))
            total.update(self._of_ended.get(engine, {}))
            restarts = sums.get(engine, total).get(_OF_RUN, 0.0)
            steps.append({**total, _OF_RUN: restarts})
        self._before, self._of_ended = dict(sums), {}
        return steps

    def _growth(self, sums: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
        return {
            engine: {name: value - self._before.get(engine, {}).get(name, 0.0) for name, value in now.items()}
            for engine, now in sums.items()
        }


def combine(workers: Sequence[Mapping[str, float]], seconds: float) -> dict[str, float]:
    """Sums over the workers of a phase that took `seconds`, and the ratios that follow from them."""
    totals: Counter[str] = Counter()
    for sums in workers:
        totals.update(sums)
    reports = totals.pop("reports", 0)
    used, capacity = totals.pop("kv_used_tokens", 0), totals.pop("kv_capacity_tokens", 0)
    running, waiting = totals.pop("engine_running", 0), totals.pop("engine_waiting", 0)
    prompts = totals["prefill_tokens"] + totals["cached_tokens"]
    return {
        **totals,
        "prefix_hit_rate": totals["cached_tokens"] / prompts if prompts else 0.0,
        "idle_share": max(0.0, 1 - totals["engine_busy_seconds"] / (seconds * len(workers))),
        "kv_use": used / capacity if capacity else 0.0,
        "running_requests": running / reports if reports else 0.0,
        "waiting_requests": waiting / reports if reports else 0.0,
    }


def trajectory_age(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Mean and maximum age of usable trajectories, in steps between their oldest tokens and `version`. 0 unless carried."""
    ages = [version - t.oldest_version for g in groups for t in g.usable if t.oldest_version is not None]
    if not ages:
        return {}
    return {"trajectory_age": sum(ages) / len(ages), "max_of_trajectory_age": float(max(ages))}
