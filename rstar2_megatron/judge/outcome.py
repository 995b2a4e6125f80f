"""The outcome of a call, and its result on the wire and typed. The sandbox imports this file: standard library only."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple


class Outcome(StrEnum):
    """How a call ended. The last three are failures of the service; the program never causes them."""

    OK = "ok"
    ERROR = "error"  # the program ended with a non-zero exit code
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # ended by a signal
    INVALID_INPUT = "invalid_input"  # the submission cannot be run (no such type, bad option)
    QUEUE_TIMEOUT = "queue_timeout"
    INTERNAL_ERROR = "internal_error"
    SESSION_LOST = "session_lost"  # the session's interpreter is gone: it has expired, or its worker died


INFRASTRUCTURE = (Outcome.QUEUE_TIMEOUT, Outcome.INTERNAL_ERROR, Outcome.SESSION_LOST)

# The public server's `reason` has fewer values.
REASONS = {
    Outcome.TIMEOUT: "worker_timeout",
    Outcome.QUEUE_TIMEOUT: "queue_timeout",
    Outcome.INTERNAL_ERROR: "internal_error",
    Outcome.SESSION_LOST: "internal_error",
    Outcome.INVALID_INPUT: "invalid_input",
}


def make_result(
    sub_id: str | None,
    outcome: Outcome,
    *,
    cost: float = 0.0,
    stdout: str = "",
    stderr: str = "",
    exit_code: int | None = None,
    signal: int | None = None,
    truncated: bool = False,
    peak_memory_bytes: int | None = None,
    queue_seconds: float | None = None,
    worker: str | None = None,
    session: str | None = None,
    success: bool | None = None,
) -> dict[str, Any]:
    """A SubmissionResult. `run_success` is exit code 0; `success` adds the comparison with expected_output.

    `session` is None for a stateless call, "new" when the call opened its session, "kept" when the session was open, and
    "lost" when it ended with this call.
    """
    run_success = outcome is Outcome.OK
    return {
        "sub_id": sub_id,
        "success": run_success if success is None else success,
        "run_success": run_success,
        "cost": cost,
        "stdout": stdout,
        "stderr": stderr,
        "reason": REASONS.get(outcome, ""),
        "outcome": str(outcome),
        "exit_code": exit_code,
        "signal": signal,
        "truncated": truncated,
        "peak_memory_bytes": peak_memory_bytes,
        "queue_seconds": queue_seconds,
        "worker": worker,
        "session": session,
    }


_OUTCOME_OF_REASON = {reason: outcome for outcome, reason in REASONS.items() if outcome is not Outcome.SESSION_LOST}


class JudgeResult(NamedTuple):
    """One call's result, from our server or the public one."""

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None  # None from the public server
    seconds: float  # wall time, measured by the server
    reason: str = ""  # '', worker_timeout, queue_timeout, internal_error, invalid_input
    success: bool = False  # run_success, and stdout as expected where expected_output was given
    truncated: bool = False
    signal: int | None = None
    peak_memory_bytes: int | None = None
    queue_seconds: float | None = None
    session: str | None = None  # "new", "kept", or "lost" (it ended with this call); None without a session

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def is_infrastructure(self) -> bool:
        """True when the service failed, not the program."""
        return self.outcome in INFRASTRUCTURE

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> JudgeResult:
        """From a SubmissionResult; the public server's lacks our extra fields."""
        reason = fields.get("reason") or ""
        run_success = bool(fields.get("run_success"))
        if "outcome" in fields:
            outcome = Outcome(fields["outcome"])
        elif reason:
            outcome = _OUTCOME_OF_REASON.get(reason, Outcome.INTERNAL_ERROR)
        else:
            outcome = Outcome.OK if run_success else Outcome.ERROR
        return cls(
            outcome=outcome,
            stdout=fields.get("stdout") or "",
            stderr=fields.get("stderr") or "",
            exit_code=fields.get("exit_code"),
            seconds=float(fields.get("cost") or 0.0),
            reason=reason,
            success=bool(fields.get("success")),
            truncated=bool(fields.get("truncated")),
            signal=fields.get("signal"),
            peak_memory_bytes=fields.get("peak_memory_bytes"),
            queue_seconds=fields.get("queue_seconds"),
            session=fields.get("session"),
        )
