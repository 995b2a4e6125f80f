"""What a program costs without a judge: a bare fork of a warm Python that runs it, no isolation, no HTTP, no Redis.

The CPU time of the same work differs between machines, and between hours on a shared one. So the lines of
`benchmarks.judge.calls` carry this number too, measured just before, with one loop for each core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import time

from benchmarks.judge.programs import BARE_CASES, program
from rstar2_megatron.judge.sandbox.zygote import import_libraries, import_standard_library


def _cpu_s() -> float:
    mine, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime


def _fork_and_run(source: str, output: int) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(output, 1)
            exec(compile(source, "source.py", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise RuntimeError(f"the program failed in a bare fork: {source!r}")


def bare_fork_cpu_ms(case: str, seconds: float = 2.0) -> float:
    """Mean CPU milliseconds of one call of `case`, with every core at it."""
    command = [sys.executable, "-m", "benchmarks.judge.bare", case, "--seconds", str(seconds)]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
    costs = [json.loads(loop.communicate(timeout=seconds + 60)[0])["cpu_ms"] for loop in loops]
    return round(sum(costs) / len(costs), 2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge.bare", description=__doc__)
    parser.add_argument("case", choices=BARE_CASES)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    import_standard_library()
    if arguments.case != "print":  # as the judge does, which keeps a small parent for such programs
        import_libraries()
    output = os.open("/dev/null", os.O_WRONLY)
    numbers = itertools.count(random.randrange(1 << 30) * 20)
    _fork_and_run(program(arguments.case, next(numbers)), output)
    calls, cpu_before, ends_at = 0, _cpu_s(), time.monotonic() + arguments.seconds
    while time.monotonic() < ends_at:
        _fork_and_run(program(arguments.case, next(numbers)), output)
        calls += 1
    print(json.dumps({"case": arguments.case, "cpu_ms": 1000 * (_cpu_s() - cpu_before) / calls}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
