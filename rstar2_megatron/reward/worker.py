"""A grading process: gets answers or responses as JSON over a pipe, and replies with verdicts.

    python -m rstar2_megatron.reward.worker MODE MEMORY_BYTES FILE_DESCRIPTOR

It has no state and may be killed at any time.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from multiprocessing.connection import Connection

from rstar2_megatron.reward.math_grader import UNGRADABLE, grade_answer
from rstar2_megatron.reward.released_grader import grade_released, released_answer
from rstar2_megatron.services.parent_death import die_with_parent

_RECURSION_LIMIT = 3000  # deep enough for real answers, shallow enough for the C stack


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.set_int_max_str_digits(10_000)


def main() -> None:
    die_with_parent(signal.SIGKILL)  # a stuck worker must not outlive the pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    pipe = Connection(int(sys.argv[3]))
    # Load the libraries before the limits and before the first clock runs.
    for answer, solution in (("\\sqrt{2}+x", "x+\\sqrt{2}"), ("(1,\\frac{x}{2})", "(1,x/2+0)")):
        for mode in {"paper", sys.argv[1]}:
            _grade(mode, f"\\boxed{{{answer}}}", [solution])
    _limit(int(sys.argv[2]))
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:  # the pool has closed
            return
        try:
            reply = _grade(**request)
        except Exception:  # parsers raise anything on hostile text
            reply = UNGRADABLE, None
        pipe.send_bytes(json.dumps(reply).encode())


def _grade(mode: str, text: str, solutions: list[str]) -> tuple[str, str | None]:
    """(verdict, answer found) of a response in released mode; (verdict, None) of an answer in paper mode."""
    if mode == "released":
        return grade_released(text, solutions), released_answer(text)
    return grade_answer(text, solutions), None


if __name__ == "__main__":
    main()
