"""Tool responses as the model reads them."""

from __future__ import annotations

import pytest

from rstar2_megatron.judge.outcome import JudgeResult, Outcome
from rstar2_megatron.rollout.tool_response import CUT_MARK, TruncateSide, format_tool_response, truncate


def result(outcome: Outcome, stdout: str = "", stderr: str = "") -> JudgeResult:
    return JudgeResult(outcome, stdout, stderr, exit_code=None, seconds=0.123)


def test_success() -> None:
    text = format_tool_response(result(Outcome.OK, stdout="42\n"))
    assert text == "Tool call success\nstdout: 42\n\nexecution time: 0.12s"


def test_failure_names_its_reason_and_keeps_both_streams() -> None:
    text = format_tool_response(result(Outcome.ERROR, "half", "Traceback"))
    assert text == "Tool call failure\nreason: error\nstdout: half\nstderr: Traceback\nexecution time: 0.12s"


def test_empty_streams_are_left_out() -> None:
    assert format_tool_response(result(Outcome.TIMEOUT)) == ("Tool call failure\nreason: timeout\nexecution time: 0.12s")


@pytest.mark.parametrize(
    ("side", "cut"), [("left", "01234" + CUT_MARK), ("right", CUT_MARK + "56789"), ("middle", "01" + CUT_MARK + "789")]
)
def test_truncate(side: TruncateSide, cut: str) -> None:
    assert truncate("0123456789", 5, side) == cut
    assert truncate("0123456789", 10, side) == "0123456789"
