"""Rows of rollouts.jsonl: lengths, turns and tool times of every trajectory, for the simulator of the scheduler.

One row a trajectory; `trace` holds [generated tokens, tokens of the answer, seconds of the tools] of each turn. A row has some
dozens of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rstar2_megatron.algorithm.filters import turns
from rstar2_megatron.trajectory import Group, Trajectory


def rollout_rows(step: int, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """A row for each usable trajectory of a step."""
    for group in groups:
        for t in group.usable:
            yield {
                "step": step,
                "query_id": t.query_id,
                "rollout_index": t.rollout_index,
                "prompt_tokens": t.prompt_tokens,
                "trace": trace(t),
                "finish_reason": t.finish_reason,
                "seconds": round(t.seconds, 3),
            }


def trace(t: Trajectory) -> list[tuple[int, int, float]]:
    """(generated tokens, tokens of the answer, seconds its tools took) of each assistant turn; no answer follows the last."""
    begins = [*(start for start, _ in t.spans[1:]), t.response_tokens]  # of what follows the answer
    rows = []
    for (start, end), begin, (_, calls) in zip(t.spans, begins, turns(t)):
        seconds = max((call.seconds for call in calls), default=0.0) if begin > end else 0.0  # calls of one turn run together
        rows.append((end - start, begin - end, round(seconds, 4)))
    return rows
