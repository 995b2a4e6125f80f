"""Counters of one rollout phase, summed over trajectories and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from rstar2_megatron.trajectory import Trajectory


@dataclass(slots=True)
class RolloutStats:
    """Everything is a sum, so that stats of several workers add up with `+=`."""

    trajectories: int = 0
    generated_tokens: int = 0
    tool_tokens: int = 0  # of tool responses and turn headers
    prefill_tokens: int = 0  # prompt tokens the engines had to compute
    cached_tokens: int = 0  # prompt tokens found in their KV caches
    retractions: int = 0  # evictions of a running request, each computed again
    engine_retries: int = 0  # turns generated again after an engine was lost
    generate_seconds: float = 0.0  # sum over trajectories
    tool_seconds: float = 0.0
    admission_seconds: float = 0.0  # waiting for room in the KV budget
    wall_seconds: float = 0.0
    tool_calls: Counter[str] = field(default_factory=Counter)  # by outcome
    endings: Counter[str] = field(default_factory=Counter)  # by finish reason

    def finish(self, trajectory: Trajectory) -> None:
        """Count a finished trajectory."""
        self.trajectories += 1
        self.generated_tokens += trajectory.num_trained_tokens
        self.tool_tokens += len(trajectory.response_ids) - trajectory.num_trained_tokens
        self.tool_calls.update(str(call.outcome) for call in trajectory.tool_calls)
        self.endings[str(trajectory.finish_reason)] += 1

    def __iadd__(self, other: RolloutStats) -> RolloutStats:
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            setattr(self, f.name, mine + theirs)
        return self

    def sums(self) -> dict[str, float]:
        """Flat values, counters one key each. They add up over workers; ratios do not, see `combine`."""
        values = {
            f.name: float(getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("tool_calls", "endings")
        }
        values |= {f"tool_calls/{name}": float(n) for name, n in sorted(self.tool_calls.items())}
        values |= {f"endings/{name}": float(n) for name, n in sorted(self.endings.items())}
        return values


def combine(workers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums over the workers of one phase, and the ratios that follow from them."""
    totals: Counter[str] = Counter()
    for sums in workers:
        totals.update(sums)
    prompts = totals["prefill_tokens"] + totals["cached_tokens"]
    return {**totals, "prefix_hit_rate": totals["cached_tokens"] / prompts if prompts else 0.0}
