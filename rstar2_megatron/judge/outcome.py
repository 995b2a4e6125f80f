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

_NONE_BY_DEFAULT = ("exit_code", "signal", "peak_memory_bytes", "queue_seconds", "worker", "session")
_OPTIONAL: dict[str, Any] = {"cost": 0.0, "stdout": "", "stderr": "", "truncated": False, **dict.fromkeys(_NONE_BY_DEFAULT)}


def make_result(sub_id: str | None, outcome: Outcome, **fields: Any) -> dict[str, Any]:
    """A SubmissionResult. `run_success` is exit code 0; `success` adds the comparison with expected_output.

    `fields` are `success` and those of `_OPTIONAL`; for `session` see JudgeResult. Raises TypeError for others.
    """
    is_ok = outcome is Outcome.OK
    result = {"sub_id": sub_id, "success": is_ok, **_OPTIONAL, **fields}
    if len(result) != len(_OPTIONAL) + 2:
        raise TypeError(f"a result has no field {', '.join(fields.keys() - _OPTIONAL.keys() - {'success'})}")
    return result | {"run_success": is_ok, "reason": REASONS.get(outcome, ""), "outcome": str(outcome)}


_OUTCOME_OF_REASON = {reason: outcome for outcome, reason in REASONS.items() if outcome is not Outcome.SESSION_LOST}


class JudgeResult(NamedTuple):
    """One call's result, from our server or the public one."""

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # None from the public server
    seconds: float = 0.0  # wall time, measured by the server
    reason: str = ""  # '', worker_timeout, queue_timeout, internal_error, invalid_input
    success: bool = False  # run_success, and stdout as expected where expected_output was given
    truncated: bool = False
    signal: int | None = None
    peak_memory_bytes: int | None = None
    queue_seconds: float | None = None
    session: str | None = None  # "new": this call opened it; "kept": it was open; "lost": it ended with this call; None: none

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
        if "outcome" in fields:
            outcome = Outcome(fields["outcome"])
        elif fields.get("reason"):
            outcome = _OUTCOME_OF_REASON.get(fields["reason"], Outcome.INTERNAL_ERROR)
        else:
            outcome = Outcome.OK if fields.get("run_success") else Outcome.ERROR
        told = {name: fields[name] for name in cls._fields if fields.get(name) is not None}
        return cls(**told | {"outcome": outcome, "seconds": float(fields.get("cost") or 0.0)})
