"""verl's reward function by the `reward` section of this project; `compare_with_verl.sh NAME --export DIR` copies it to DIR."""

from __future__ import annotations

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

from rstar2_megatron.extension.user_code import FOLDERS
from rstar2_megatron.reward.own import OwnReward
from rstar2_megatron.reward.pool import Grade, GraderPool
from rstar2_megatron.settings.schema import RewardSettings

_TOOL_RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)


@functools.cache
def _settings() -> RewardSettings:
    """`reward.*` of the exported configuration, from grading.json beside this file."""
    here = Path(__file__).parent
    return RewardSettings.model_validate_json((here / "grading.json").read_text(), context={FOLDERS: [here]})


@functools.cache
def _pool() -> GraderPool:
    reward = _settings()
    return GraderPool(reward.num_workers, reward.timeout_s, mode=reward.mode)


@functools.cache
def _own(number: int) -> OwnReward:
    return OwnReward(_settings().weighted[number].function, _settings().arguments)


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> float:
    """The weighted sum of `reward.terms`. ground_truth: a JSON list of solutions. Mode `paper` grades the model's own text.

    A function of the user's gets the columns of its row, which verl knows by other names, and what verl adds to extra_info.
    """
    text = _TOOL_RESPONSE.sub("", solution_str) if _settings().mode == "paper" else solution_str
    score = 0.0
    for number, term in enumerate(_settings().weighted):
        if term.function == "math":
            grade: Grade = await _pool().grade(text, json.loads(ground_truth))
        else:
            own, row = _own(number), json.loads(extra_info["row"])
            row["extra_info"] |= {name: value for name, value in extra_info.items() if name not in ("row", "index")}
            found = own.call_as_verl(solution_str=solution_str, **row)
            grade = own.grade(await found if inspect.isawaitable(found) else found)
        score += term.weight * grade.reward
    return score
