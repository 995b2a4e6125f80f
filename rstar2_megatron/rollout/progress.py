"""Progress of a running rollout phase, and an estimate of its remaining time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival

_RATE_WINDOW_S = 20.0


@dataclass(slots=True)
class EngineLoad:
    """The current activity of one engine's worker. Tokens are of responses, tool responses included."""

    engine: int
    tokens: int  # of this phase so far
    running: list[int]  # tokens so far of each running trajectory
    waiting: int  # trajectories that were taken and do not run
    tool_calls: int  # in flight
    kv_used_tokens: int
    kv_capacity_tokens: int


@dataclass(slots=True)
class Progress:
    """One moment of a phase."""

    label: str
    groups_done: int
    groups: int
    tokens: int
    tokens_per_second: float
    seconds_left: float | None
    """By the estimate of lengths at the present speed; None until the speed is known."""
    loads: Sequence[EngineLoad] = ()

    @property
    def running(self) -> int:
        return sum(len(load.running) for load in self.loads)

    @property
    def tool_calls(self) -> int:
        return sum(load.tool_calls for load in self.loads)

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", about {duration(self.seconds_left)} left"
        return (
            f"{self.label}: {self.groups_done}/{self.groups} groups, {count(self.tokens)} tokens, "
            f"{count(self.tokens_per_second)}/s, {self.running} running, {self.tool_calls} calls in flight{left}"
        )


@dataclass(slots=True)
class PhaseProgress:
    """The progress of one phase. `lengths` is kept from phase to phase, so that a first estimate exists."""

    label: str
    lengths: LengthSurvival
    _samples: deque[tuple[float, int]] = field(default_factory=deque)  # (time, tokens)

    def at(self, now: float, groups_done: int, groups: int, unstarted: int, loads: Sequence[EngineLoad]) -> Progress:
        """The progress at time `now` in seconds. unstarted: trajectories that no engine has taken yet."""
        tokens = sum(load.tokens for load in loads)
        self._samples.append((now, tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        rate = (tokens - before) / (now - since) if now > since else 0.0
        running = [length for load in loads for length in load.running]
        self.lengths.refresh(running)
        to_start = unstarted + sum(load.waiting for load in loads)
        left = sum(map(self.lengths.expected_left, running)) + to_start * self.lengths.expected_left(0)
        return Progress(self.label, groups_done, groups, tokens, rate, left / rate if rate > 0 else None, loads)


def count(number: float) -> str:
    """1234567 as 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """90 as 1.5 min."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
