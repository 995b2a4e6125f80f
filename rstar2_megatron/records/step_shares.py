"""Shares of a step: what its seconds went to. They add up to 1."""

from __future__ import annotations

from collections.abc import Mapping

SHARES = ("rollout", "tail", "grading", "training", "sync", "checkpoint", "other")


def step_shares(seconds: Mapping[str, float], tail_s: float = 0.0, grading_s: float = 0.0) -> dict[str, float]:
    """Share of each of `SHARES` in the step.

    seconds: `step` and its parts on the driver's clock (`rollout`, `training`, `sync_weights`, `save`, `checkpoint`).
    tail_s: the end of the rollout, from the first engine without work on; grading_s: its last part, when nothing was
    generated any more. Both are parts of `rollout`. Empty for a step without time.
    """
    step = seconds.get("step", 0.0)
    if step <= 0:
        return {}
    rollout = seconds.get("rollout", 0.0)
    grading = min(max(grading_s, 0.0), rollout)
    tail = min(max(tail_s - grading, 0.0), rollout - grading)
    parts = {
        "rollout": rollout - grading - tail,
        "tail": tail,
        "grading": grading,
        "training": seconds.get("training", 0.0),
        "sync": seconds.get("sync_weights", 0.0),
        "checkpoint": seconds.get("save", 0.0) + seconds.get("checkpoint", 0.0),
    }
    parts["other"] = max(0.0, step - sum(parts.values()))
    return {name: part / step for name, part in parts.items()}
