"""A grading process: gets requests over a pipe, and sends the replies to each.

    python -m rstar2_megatron.reward.worker KIND FILE_DESCRIPTOR

KIND is math (the built-in grader) or own (reward functions of the user). The first message says how it grades. It has no
state and may be killed at any time.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.services.parent_death import die_with_parent

Answer = Callable[[bytes], Iterator[bytes]]

_RECURSION_LIMIT = 3000  # deep enough for real answers, shallow enough for the C stack


def main() -> None:
    die_with_parent(signal.SIGKILL)  # a stuck process must not outlive the pool
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    pipe = Connection(int(sys.argv[2]))
    about = pickle.loads(pipe.recv_bytes())
    try:
        answer = _math(*about) if sys.argv[1] == "math" else _own(*about)
    except UserCodeError as error:
        pipe.send_bytes(str(error).encode())
        return
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:  # the pool has closed
            return
        for reply in answer(request):
            pipe.send_bytes(reply)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _math(mode: str, memory_mb: int) -> Answer:
    """Answers or responses as JSON; the reply is (verdict, answer found) as JSON, because hostile text has been read here."""
    from rstar2_megatron.reward.math_grader import UNGRADABLE, grade_answer  # Here: functions of the user may not need it.
    from rstar2_megatron.reward.released_grader import grade_released, released_answer

    def grade(text: str, solutions: list[str]) -> tuple[str, str | None]:
        if mode == "released":
            return grade_released(text, solutions), released_answer(text)
        return grade_answer(text, solutions), None

    def answer(request: bytes) -> Iterator[bytes]:
        try:
            reply = grade(*json.loads(request))
        except Exception:  # parsers raise anything on hostile text
            reply = UNGRADABLE, None
        yield json.dumps(reply).encode()

    # Load the libraries before the limits and before the first clock runs.
    for text, solution in (("\\sqrt{2}+x", "x+\\sqrt{2}"), ("(1,\\frac{x}{2})", "(1,x/2+0)")):
        grade(f"\\boxed{{{text}}}", [solution])
    _limit(memory_mb * 1024**2)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.set_int_max_str_digits(10_000)
    return answer


def _own(named: Mapping[str, tuple[UserCode, dict[str, Any]]], memory_mb: int) -> Answer:
    """Functions by name, with their arguments; a request names one and has items, each of which gets a Grade.

    The process may take `memory_mb` more than it has with the user's libraries loaded.
    """
    from rstar2_megatron.reward.own import OwnReward  # Here: the judge's graders have no libraries for it.

    functions = {name: OwnReward(code, arguments) for name, (code, arguments) in named.items()}

    def answer(request: bytes) -> Iterator[bytes]:
        name, items = pickle.loads(request)
        function = functions[name]
        for problem, trajectory in items:
            try:
                grade = function.grade(function(problem, trajectory))
            except BaseException as error:  # whatever it is, it belongs to the call
                grade = function.failed(error)
            yield pickle.dumps(grade)

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _limit(now + memory_mb * 1024**2)
    return answer


if __name__ == "__main__":
    main()
