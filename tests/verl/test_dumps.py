"""Tool errors from verl's dumped rollouts, merged into verl's own log and read by the curve tool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.verl.dumps import add_tool_errors, tool_errors
from rstar2_megatron.report.read import read_logs
from rstar2_megatron.rollout.tool_response import format_refusal, format_tool_response


@dataclass
class Run:
    outcome: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.1


OK, ERROR = (format_tool_response(Run("ok", "relative error 1e-9")), format_tool_response(Run("error", "", "x")))


def rollout(score: float, *responses: str) -> dict:
    turns = "".join(f"user\n<tool_response>\n{text}\n</tool_response>\nassistant\n<reason>" for text in responses)
    return {"output": f"<tool_call>...</tool_call>\n{turns} done", "score": score}


def test_errors_are_counted_by_outcome_not_by_the_word() -> None:
    rows = [rollout(1.0, OK, ERROR), rollout(1.0, OK, OK), rollout(0.0, format_refusal("no such tool")), rollout(0.0)]
    found = tool_errors(rows)
    assert found == {"rollout/tool_error_ratio": 2 / 5, "rollout/tool_error_ratio_positive": 1 / 4}
    assert tool_errors([rollout(0.0, ERROR)]) == {"rollout/tool_error_ratio": 1.0}
    assert tool_errors([rollout(1.0)]) == {}


def test_the_merged_log_is_read_as_verls(tmp_path: Path) -> None:
    log, dumps = tmp_path / "log.jsonl", tmp_path / "rollouts"
    dumps.mkdir()
    rows = [{"step": step, "data": {"critic/rewards/mean": 0.5, "timing_s/step": 2.0}} for step in (1, 2)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (dumps / "2.jsonl").write_text(json.dumps(rollout(1.0, ERROR)) + "\n")
    assert add_tool_errors(log, dumps, tmp_path / "metrics.jsonl") == 2
    (read,) = read_logs(tmp_path / "metrics.jsonl")
    assert read.kind == "verl"
    assert read.series["rollout/pass_rate"] == {1: 0.5, 2: 0.5}
    assert read.series["rollout/tool_error_ratio_positive"] == {2: 1.0}


def test_a_broken_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        add_tool_errors(tmp_path / "absent.jsonl", tmp_path, tmp_path / "out.jsonl")
