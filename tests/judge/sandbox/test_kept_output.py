"""What a program printed before its end is in the answer, whatever ended it: a limit, a signal or a crash."""

from __future__ import annotations

import pytest

from benchmarks.judge.programs import in_public_template
from tests.judge.conftest import MEMORY_MB, Run
from tests.judge.sandbox.conftest import need

PRINTED = "print('partial answer 42')\n"
CHILD_TAKES_MEMORY = f"""
import os, mmap, time
def take(megabytes):
    memory = mmap.mmap(-1, megabytes << 20)
    for _ in range(megabytes): memory.write(bytes(1 << 20))
    return memory
child = os.fork()
kept = take({MEMORY_MB * 2 // 3} if child == 0 else {MEMORY_MB * 8 // 10})
time.sleep(60)
"""
ENDINGS = {
    "time: a loop": ("while True: pass", "timeout"),
    "time: sleep": ("import time; time.sleep(60)", "timeout"),
    "time: in a C function": ("2 ** (10 ** 11)", "timeout"),
    "time: a thread that is joined": (
        "import threading, time; t = threading.Thread(target=time.sleep, args=(60,)); t.start(); t.join()",
        "timeout",
    ),
    "time: its children": ("import subprocess; subprocess.run(['sleep', '60'])", "timeout"),
    "CPU": ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass", "timeout"),
    "memory of one process": (f"x = bytearray({2 * MEMORY_MB} << 20)", "memory"),
    "memory of all": (CHILD_TAKES_MEMORY, "memory"),
    "SIGTERM": ("import os; os.kill(os.getpid(), 15)", "killed"),
    "SIGKILL": ("import os; os.kill(os.getpid(), 9)", "killed"),
    "abort": ("import os; os.abort()", "killed"),
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", "killed"),
    "an exception": ("1 / 0", "error"),
    "os._exit": ("import os; os._exit(3)", "error"),
    "too much output": ("while True: print('x' * 10_000)", "output_limit"),
    "too much on stderr": ("import sys\nwhile True: print('x' * 10_000, file=sys.stderr)", "output_limit"),
}


@pytest.mark.parametrize("in_template", [False, True], ids=["plain", "template"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_was_printed_is_in_the_answer(run: Run, layers: set[str], ending: str, in_template: bool) -> None:
    end, outcome = ENDINGS[ending]
    if ending == "memory of all":
        need(layers, "memory_cgroup")
    program = PRINTED + end
    limit = "1" if ending.startswith("time") else "30"
    result = run(in_public_template(program) if in_template else program, options={"time_limit_s": limit})
    assert result["stdout"].startswith("partial answer 42\n"), result
    assert result["outcome"] == ("error" if in_template and outcome == "memory" and "all" not in ending else outcome), result


@pytest.mark.parametrize("end", ["while True: pass", "import time; time.sleep(60)"])
def test_a_line_without_its_end_is_kept_at_the_time_limit(run: Run, end: str) -> None:
    program = f"import sys\nprint('first', end=' ')\nsys.stdout.write('second')\n{end}"
    result = run(program, options={"time_limit_s": "0.5"})
    assert (result["stdout"], result["outcome"], result["signal"]) == ("first second", "timeout", 9), result


def test_a_program_that_will_not_end_at_its_limit_is_ended(run: Run) -> None:
    program = "import signal\nfor n in (15, 24, 2): signal.signal(n, lambda *_: print('no'))\nprint('x')\nwhile True: pass"
    result = run(program, options={"time_limit_s": "0.5"})
    assert result["outcome"] == "timeout" and result["stdout"].startswith("x\n")


def test_lines_of_threads_stay_whole(run: Run) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda n: [print('line', 'of', n) for _ in range(50)], range(8)))
"""
    lines = run(program, options={"output_chars": "100000"})["stdout"].splitlines()
    assert len(lines) == 400 and all(line.startswith("line of ") and len(line) == 9 for line in lines)
