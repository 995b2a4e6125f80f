"""verl's log with what verl does not log: tool errors, counted in the rollouts that `trainer.rollout_data_dir` dumps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.rollout.tool_response import SUCCESS

_OPENING = "<tool_response>\n"


def tool_errors(rollouts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Tool errors per answered call, of all rollouts and of those with a positive score, under this project's names.

    A row has `output`, the decoded response, and `score`. A call that verl cannot parse gets no response and is not counted.
    """
    calls, errors = {False: 0, True: 0}, {False: 0, True: 0}
    for row in rollouts:
        positive = row["score"] > 0
        for response in row["output"].split(_OPENING)[1:]:
            calls[positive] += 1
            errors[positive] += not response.startswith(SUCCESS)
    ratios = {}
    if sum(calls.values()):
        ratios["rollout/tool_error_ratio"] = sum(errors.values()) / sum(calls.values())
    if calls[True]:
        ratios["rollout/tool_error_ratio_positive"] = errors[True] / calls[True]
    return ratios


def add_tool_errors(log: Path, dumps: Path, out: Path) -> int:
    """Write `log`, verl's `file` log, to `out` with the tool errors of DUMPS/STEP.jsonl. Returns the last step.

    Raises OSError or ValueError for a file that cannot be read.
    """
    rows = _rows(log)
    for row in rows:
        dump = dumps / f"{row['step']}.jsonl"
        if dump.is_file():
            row["data"] |= tool_errors(_rows(dump))
    write_jsonl(out, rows)
    return max((int(row["step"]) for row in rows), default=0)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
