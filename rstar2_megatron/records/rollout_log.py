"""Rows of rollouts.jsonl: lengths, turns and tool times of every trajectory, for the simulator of the scheduler.

One row a trajectory; `trace` holds [generated tokens, tool tokens, tool seconds] of each turn. A row has some dozens of
bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

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
    """(generated tokens, tokens of the tool's response, seconds the tool took) of each assistant turn."""
    generated = [end - start for start, end in t.spans]
    edges = [0, *itertools.chain(*t.spans), t.response_tokens]
    responses = [end - start for start, end in zip(edges[::2], edges[1::2]) if end > start]
    answered = max(1, len(responses))
    per_turn = max(1, len(t.tool_calls) // answered)  # calls of one turn run together
    turns = []
    for number, tokens in enumerate(generated):
        calls = t.tool_calls[number * per_turn : (number + 1) * per_turn] if number < len(responses) else []
        response = responses[number] if number < len(responses) else 0
        turns.append((tokens, response, round(max((call.seconds for call in calls), default=0.0), 4)))
    return turns
