"""A trajectory as one JSON object: a row of trajectories.jsonl, in training and in evaluation. Pure."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rstar2_megatron.trajectory import Problem, Trajectory


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


# Per-token lists take a few bytes a token as base64 of deflated little-endian arrays, not ten as decimal text.


def pack_ints(values: Sequence[int] | np.ndarray) -> str:
    """int32 values as text."""
    return _pack(np.asarray(values, dtype="<i4"))


def pack_floats(values: Sequence[float] | np.ndarray) -> str:
    """Values as float16 text: three digits, from 6e-8 to 65504."""
    return _pack(np.asarray(values, dtype="<f4").clip(-65504, 65504).astype("<f2"))


def unpack_ints(text: str) -> list[int]:
    """The values that `pack_ints` packed. Raises ValueError for other text."""
    return _unpack(text, "<i4")


def unpack_floats(text: str) -> list[float]:
    """The values that `pack_floats` packed, rounded to float16. Raises ValueError for other text."""
    return _unpack(text, "<f2")


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes())).decode()


def _unpack(text: str, kind: str) -> list[Any]:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind).tolist()
    except (zlib.error, ValueError) as error:
        raise ValueError(f"not packed by this project: {error}") from None
