"""A trajectory as one JSON object: what training and evaluation write to their trajectories.jsonl. Pure."""

from __future__ import annotations

from typing import Any

from rstar2_megatron.trajectory import Problem, Trajectory


def trajectory_row(problem: Problem, t: Trajectory) -> dict[str, Any]:
    """Everything a person wants to see of a trajectory; token ids are left out."""
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
        "finish_reason": t.finish_reason.value if t.finish_reason else None,
        "reward": t.reward,
        "grade": t.grade_detail,
        "answer": t.answer,
        "prompt_tokens": len(t.prompt_ids),
        "response_tokens": len(t.response_ids),
        "trained_tokens": t.num_trained_tokens,
        "versions": [[span.start, span.end, span.version] for span in t.version_spans],
        "seconds": round(t.seconds, 3),
        "error": t.error,
    }
