"""Text of a tool response, in the format of existing Code Judge clients."""

from __future__ import annotations

from typing import Literal, Protocol

TruncateSide = Literal["left", "middle", "right"]
CUT_MARK = "...(truncated)..."
SUCCESS = "Tool call success"


class ToolRun(Protocol):
    """One finished run of a tool, as the judge's client reports it."""

    @property
    def outcome(self) -> str: ...  # "ok", error, timeout, memory, killed, ...

    @property
    def stdout(self) -> str: ...

    @property
    def stderr(self) -> str: ...

    @property
    def seconds(self) -> float: ...


def format_tool_response(run: ToolRun, seconds: float | None = None) -> str:
    """The tool response for one run. Empty streams are left out. `seconds` is shown in place of the measured time."""
    failed = str(run.outcome) != "ok"
    lines = ["Tool call failure", f"reason: {run.outcome}"] if failed else [SUCCESS]
    if run.stdout:
        lines.append(f"stdout: {run.stdout}")
    if run.stderr:
        lines.append(f"stderr: {run.stderr}")
    lines.append(f"execution time: {run.seconds if seconds is None else seconds:.2f}s")
    return "\n".join(lines)


def format_refusal(message: str) -> str:
    """The tool response for a call that could not be run."""
    return f"Tool call failure\nreason: {message}"


NOISE = format_refusal("the tool is not available; call it again.")
"""What the model reads of a call that `agentloop.tool_noise` lets fail."""


def truncate(text: str, max_chars: int, side: TruncateSide) -> str:
    """Cut `text` to `max_chars` of its characters, plus a mark at the cut.

    `side` names the kept part, as in RLinf and in verl before its #6313: the left end, the right end, or (`middle`) half of
    the characters from each end.
    """
    if len(text) <= max_chars:
        return text
    if side == "left":
        return text[:max_chars] + CUT_MARK
    if side == "right":
        return CUT_MARK + text[len(text) - max_chars :]
    head = max_chars // 2
    return text[:head] + CUT_MARK + text[len(text) - (max_chars - head) :]
