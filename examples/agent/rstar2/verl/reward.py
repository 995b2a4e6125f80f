"""verl's reward function on this project's grader; `compare_with_verl.sh NAME --export DIR` copies this file to DIR."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from rstar2_megatron.reward.pool import GraderPool

_TOOL_RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)


@functools.cache
def _settings() -> dict[str, Any]:
    """`reward.*` of the exported configuration, from grading.json beside this file."""
    return json.loads((Path(__file__).parent / "grading.json").read_text())


@functools.cache
def _pool() -> GraderPool:
    reward = _settings()
    return GraderPool(reward["num_workers"], reward["timeout_s"], mode=reward["mode"])


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> float:
    """1.0 where the response has one of the solutions, a JSON list, else 0.0. Mode `paper` grades the model's own text."""
    text = _TOOL_RESPONSE.sub("", solution_str) if _settings()["mode"] == "paper" else solution_str
    return (await _pool().grade(text, json.loads(ground_truth))).reward
