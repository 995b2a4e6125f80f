"""verl's reward function on this project's grader; `compare_with_verl.sh NAME --export DIR` copies this file to DIR."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from rstar2_megatron.reward.pool import GraderPool


@functools.cache
def _pool() -> GraderPool:
    """grading.json beside this file holds `reward.*` of the exported configuration."""
    reward = json.loads((Path(__file__).parent / "grading.json").read_text())
    return GraderPool(reward["num_workers"], reward["timeout_s"], mode=reward["mode"])


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """1.0 where the response has one of the solutions, a JSON list, else 0.0."""
    return (await _pool().grade(solution_str, json.loads(ground_truth))).reward
