"""The reward of the public code, by the public code: RLinf brings the two graders of microsoft/rStar.

A response is right if either grader accepts it, tool output included. The first one cuts a piece out of the response by cue
words or a box and compares it leniently. In the second, math-verify searches the whole response for expressions. `<answer>`
tags have no effect. A number printed by a tool can count as the answer, and 300 or 0.03 are right where the solution is 3.
The public curves contain all this; `reward.mode: paper` has none of it.

The graders' files are loaded without RLinf itself, which takes seconds and memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rstar2_megatron.reward.math_grader import CORRECT, WRONG

_GRADERS = "algorithms/rewards/rstar2/fused_compute_score"
_MAX_SHOWN_CHARS = 200


@functools.cache
def _graders() -> tuple[Any, Any]:
    """(RLinf's `compute_score`, the module of its first grader). Raises RuntimeError without RLinf."""
    rlinf = importlib.util.find_spec("rlinf")
    if rlinf is None or not rlinf.submodule_search_locations:
        raise RuntimeError("reward.mode=released grades by RLinf's files: pip install --no-deps rlinf==0.3.0")
    package = ModuleType("released_graders")
    package.__path__ = [str(Path(rlinf.submodule_search_locations[0]) / _GRADERS)]
    sys.modules[package.__name__] = package
    names = ("compute_score", "prime_math", "prime_math.grader")
    both, first, of_first = map(importlib.import_module, (f"{package.__name__}.{name}" for name in names))
    # Without its time limit, which is a process for each comparison: the pool has limits.
    vars(first)["are_equal_under_sympy"] = first.are_equal_under_sympy.__wrapped__
    vars(of_first)["eval"] = _arithmetic
    return both.compute_score, first


def _arithmetic(text: str) -> Any:
    """The value of 2*3.14 in place of Python's `eval`, which would run what the model writes behind \\pi."""
    if not re.fullmatch(r"[\d.+\-*/() ]+", text):
        raise ValueError("no arithmetic")
    return eval(text)


def grade_released(response: str, solutions: list[str]) -> str:
    """CORRECT when either grader accepts any solution, else WRONG. It may be endless: run it in a killable process."""
    compute_score, _ = _graders()
    return CORRECT if any(compute_score(response, solution) for solution in solutions) else WRONG


def released_answer(response: str) -> str:
    """The beginning of the answer as the first grader extracts it, for people."""
    _, first = _graders()
    return str(first.match_answer(response)[1])[:_MAX_SHOWN_CHARS]
