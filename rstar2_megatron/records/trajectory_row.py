"""A trajectory as one JSON object: a row of trajectories.jsonl, in training and in evaluation. Pure."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rstar2_megatron.trajectory import FinishReason, HeldTokens, Problem, ToolCall, ToolOutcome, Trajectory


def trajectory_row(problem: Problem, t: Trajectory) -> dict[str, Any]:
    """Texts, tool calls, grade and lengths of a trajectory, without token ids."""
    return {
        "query_id": t.query_id,
        "rollout_index": t.rollout_index,
        "task": problem.task,
        "prompt": problem.prompt,
        "solutions": problem.solutions,
        "turns": t.assistant_texts,
        "tool_calls": [
            {
                "name": call.name,
                "arguments": call.arguments,
                "outcome": call.outcome.value,
                "response": call.response_text,
                "seconds": round(call.seconds, 3),
            }
            for call in t.tool_calls
        ],
        "calls_per_turn": t.calls_per_turn,
        **({"opening": t.opening} if t.opening else {}),
        **({"observations": t.observations} if t.observations else {}),
        "finish_reason": t.finish_reason.value if t.finish_reason else None,
        "reward": t.reward,
        **({"reward_terms": t.reward_terms} if t.reward_terms else {}),
        "positive": t.is_positive,
        "grade": t.grade_detail,
        "answer": t.answer,
        "prompt_tokens": t.prompt_tokens,
        "response_tokens": t.response_tokens,
        "trained_tokens": t.num_trained_tokens,
        "versions": [[span.start, span.end, span.version] for span in t.version_spans],
        "seconds": round(t.seconds, 3),
        "error": t.error,
    }


def trajectory_of(row: dict[str, Any]) -> tuple[Problem, Trajectory]:
    """What `trajectory_row` was made of, as rewards see it: without tokens and the problem's own columns. Raises KeyError."""
    calls = [
        ToolCall(call["name"], call["arguments"], ToolOutcome(call["outcome"]), call["response"], call["seconds"])
        for call in row["tool_calls"]
    ]
    trajectory = Trajectory(
        row["query_id"],
        row["rollout_index"],
        assistant_texts=row["turns"],
        tool_calls=calls,
        calls_per_turn=row["calls_per_turn"],
        opening=row.get("opening", ""),
        observations=row.get("observations", []),
        finish_reason=FinishReason(row["finish_reason"]),
        seconds=row["seconds"],
        held=HeldTokens(0, 0, row["prompt_tokens"], row["response_tokens"], [(0, row["trained_tokens"])], 0.0),
    )
    return Problem(row["query_id"], row["prompt"], row["solutions"], row["task"]), trajectory


# Per-token lists take a few bytes a token as base64 of deflated little-endian arrays, not ten as decimal text.
INTS = "<i4"
FLOATS = "<f2"  # three digits, from 6e-8 to 65504


def pack(values: Sequence[float] | np.ndarray, kind: str) -> str:
    """Values as text, stored as INTS or FLOATS. Larger floats become the largest."""
    array = np.asarray(values, dtype="<f4").clip(-65504, 65504) if kind == FLOATS else np.asarray(values)
    return base64.b64encode(zlib.compress(array.astype(kind).tobytes())).decode()


def unpack(text: str, kind: str) -> list[Any]:
    """The values that `pack` stored. Raises ValueError for other text."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind).tolist()
    except (zlib.error, ValueError) as error:
        raise ValueError(f"not packed by this project: {error}") from None
