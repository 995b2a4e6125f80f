"""Counters of one rollout phase, summed over trajectories and workers."""

from __future__ import annotations

from collections import Counter
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

    @property
    def prefix_hit_rate(self) -> float:
        total = self.prefill_tokens + self.cached_tokens
        return self.cached_tokens / total if total else 0.0

    def metrics(self) -> dict[str, float]:
        """Flat values under `rollout/`, counters one key each."""
        values = {
            f"rollout/{f.name}": float(getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("tool_calls", "endings")
        }
        values["rollout/prefix_hit_rate"] = self.prefix_hit_rate
        values |= {f"rollout/tool_calls/{name}": float(n) for name, n in sorted(self.tool_calls.items())}
        values |= {f"rollout/endings/{name}": float(n) for name, n in sorted(self.endings.items())}
        return values
