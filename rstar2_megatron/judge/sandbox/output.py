"""The bounded output of a call, and its result."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.outcome import Outcome, make_result

_READ_SIZE = 1 << 16
SHORTAGES = {
    Outcome.MEMORY: "",
    Outcome.QUEUE_TIMEOUT: "This node's calls together used up the judge's memory: lower --workers or --memory-mb.\n",
}


class Output:
    """One output stream of the call, kept up to a limit."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.limit = limit  # bytes that are kept
        self.parts: list[bytes] = []
        self.size = 0  # bytes that were written

    @property
    def is_too_much(self) -> bool:
        return self.size > self.limit

    def read(self) -> bool:
        """Read once. False at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return True
        if not self.is_too_much:
            self.parts.append(data)
        self.size += len(data)
        return bool(data)

    def drain(self) -> None:
        """Read what is in the pipe, without waiting for writers that may live on."""
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):
            while not self.is_too_much:
                before = self.size
                if not self.read() or self.size == before:
                    break

    def close(self) -> None:
        """Read the rest and close the pipe."""
        self.drain()
        os.close(self.fd)

    def text(self) -> str:
        return b"".join(self.parts).decode("utf-8", "backslashreplace")

    def clear(self) -> None:
        """Drop what was read, before the next call of a session."""
        self.parts.clear()
        self.size = 0


def shorten(text: str, limit: int) -> tuple[str, bool]:
    """At most `limit` characters: head and tail around a note. The second value tells whether it was cut."""
    if len(text) <= limit:
        return text, False
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    room = limit - len(note)
    if room < 20:
        return text[:limit], True
    head = room - room // 2
    return text[:head] + note + text[len(text) - room // 2 :], True


def outcome_of_failure(failure: str) -> Outcome:
    """The outcome of a call whose program did not begin, for this reason."""
    return Outcome.INVALID_INPUT if failure.startswith("files: ") else Outcome.INTERNAL_ERROR


def report(
    job: dict[str, Any],
    limits: CallLimits,
    code: int,
    verdict: Outcome | None,
    *,
    cost: float,
    stdout: str,
    stderr: str,
    peak_memory_bytes: int,
    session: str | None = None,
) -> dict[str, Any]:
    """A SubmissionResult. `code` is an exit code, negative for a signal; `verdict` the reason why the call was ended."""
    ended_by = -code if code < 0 else None
    if verdict is None:
        if code == 0:
            verdict = Outcome.OK
        elif ended_by == signal.SIGXCPU:
            verdict = Outcome.TIMEOUT
        elif ended_by is not None:
            verdict = Outcome.KILLED
        elif "MemoryError" in stderr[stderr.rstrip().rfind("\n") + 1 :]:
            verdict = Outcome.MEMORY
        else:
            verdict = Outcome.ERROR
    expected = job.get("expected_output")
    success = verdict is Outcome.OK and (expected is None or stdout.strip() == expected.strip())
    shown_out, cut_out = shorten(stdout, limits.output_chars)
    shown_err, cut_err = shorten(stderr, limits.output_chars)
    return make_result(
        job.get("sub_id"),
        verdict,
        cost=cost,
        stdout=shown_out,
        stderr=shown_err,
        exit_code=code if code >= 0 else 128 - code,
        signal=ended_by,
        truncated=cut_out or cut_err,
        peak_memory_bytes=peak_memory_bytes,
        queue_seconds=job.get("queue_seconds"),
        worker=job.get("worker"),
        session=session,
        success=success,
    )
