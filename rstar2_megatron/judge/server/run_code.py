"""SandboxFusion's `POST /run_code`, so that verl's tool and its code rewards can use this judge.

A program that ends by itself is Finished, whatever its exit code; the request's status is Success for exit code 0 and Failed
otherwise. What the service could not run is SandboxError.
"""

from __future__ import annotations

from typing import Any

from rstar2_megatron.judge.limits import FieldError, Submission
from rstar2_megatron.judge.outcome import JudgeResult, Outcome

_LANGUAGES = {"python": "python", "cpp": "cpp", "C++": "cpp"}
_STATUS = {Outcome.TIMEOUT: "TimeLimitExceeded", Outcome.OK: "Finished", Outcome.ERROR: "Finished", Outcome.KILLED: "Finished"}


def submission_of(body: Any) -> Submission:
    """Fields that are not known here (fetch_files, an empty compile limit) are ignored. Raises FieldError."""
    if not isinstance(body, dict):
        raise FieldError((), "must be an object")
    language = body.get("language")
    if language not in _LANGUAGES:
        raise FieldError(("language",), f"must be one of {', '.join(_LANGUAGES)}")
    options: dict[str, Any] = {"show_value": "false"}  # SandboxFusion shows what a program prints alone
    limit, memory = body.get("run_timeout"), body.get("memory_limit_MB")
    if limit is not None:
        options["time_limit_s"] = limit
    if memory is not None and memory != -1:  # no limit
        options["memory_mb"] = memory
    files = body.get("files") or {}
    if not isinstance(files, dict):
        raise FieldError(("files",), "must be an object: path to base64")
    if files:
        options["files"] = {path: {"base64": content} for path, content in files.items() if content is not None}
    fields = {"type": _LANGUAGES[language], "solution": body.get("code"), "input": body.get("stdin"), "options": options}
    try:
        return Submission.from_wire(fields)
    except FieldError as error:
        own = str(error.place[-1])
        raise FieldError(({"solution": "code", "input": "stdin"}.get(own, own),), error.why) from None


def answer_of(fields: dict[str, Any]) -> dict[str, Any]:
    result = JudgeResult.from_wire(fields)
    answer: dict[str, Any] = {"message": "", "compile_result": None, "run_result": None, "executor_pod_name": None, "files": {}}
    if result.is_infrastructure or result.outcome is Outcome.INVALID_INPUT:
        return answer | {"status": "SandboxError", "message": result.stderr or str(result.outcome)}
    run = {
        "status": _STATUS.get(result.outcome, "Error"),
        "execution_time": result.seconds,
        "return_code": -result.signal if result.signal else result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }
    return answer | {"status": "Success" if result.ok else "Failed", "run_result": run}
