"""The typed result of a call, from our server or the public one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rstar2_megatron.judge.outcome import INFRASTRUCTURE, REASONS, Outcome

_OUTCOME_OF_REASON = {
    reason: outcome for outcome, reason in REASONS.items() if outcome is not Outcome.SESSION_LOST
}


@dataclass(frozen=True, slots=True)
class JudgeResult:
    """One call's result."""

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
