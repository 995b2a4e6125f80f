"""Rows as sampling writes them, made up."""

from __future__ import annotations

from typing import Any

from rstar2_megatron.evaluation.samples import Sample
from rstar2_megatron.trajectory import Problem


def problem(query_id: str, text: str = "2+2?") -> Problem:
    return Problem(query_id, [{"role": "user", "content": text}], ["4"])


def row(query_id: str = "q", index: int = 0, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "query_id": query_id,
        "rollout_index": index,
        "task": "math",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "solutions": ["4"],
        "turns": ["a", "b"],
        "tool_calls": [],
        "finish_reason": "answered",
        "reward": 1.0,
        "grade": "correct",
        "answer": "4",
        "response_tokens": 10,
        "trained_tokens": 8,
        "seconds": 1.0,
    }
    values |= changes
    return {"positive": (values["reward"] or 0.0) > 0} | values


def attempt(query_id: str, index: int, answer: str | None, right: bool, **changes: Any) -> Sample:
    return Sample.from_row(
        row(query_id, index, answer=answer, reward=float(right), grade="correct" if right else "wrong", **changes)
    )
