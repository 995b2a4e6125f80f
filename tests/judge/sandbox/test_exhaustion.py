"""Programs that try to use up memory, disk, processes, time or output, or to outlive their call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.sandbox.output import Output
from tests.judge.calls import HELD, let_go, until_marked
from tests.judge.conftest import Run
from tests.judge.sandbox.conftest import SURVIVOR, need

pytestmark = pytest.mark.usefixtures("service_untouched")


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(10 << 30)",
        "import mmap; m = mmap.mmap(-1, 10 << 30); m[:] = bytes(1) * (10 << 30)",
        "import numpy; numpy.ones(10 << 27)",
        "x = []\nwhile True: x.append('y' * 1_000_000)",
        "int('9' * 4000) ** 9_999_999_999",
    ],
)
def test_ten_gigabytes_of_memory(run: Run, program: str) -> None:
    result = run(program, options={"time_limit_s": "0.5"})
    assert result["outcome"] in ("memory", "error", "timeout") and not result["run_success"]


def test_ten_gigabytes_of_disk_and_a_hundred_thousand_files(run: Run, layers: set[str]) -> None:
    need(layers, "private_tmpfs")
    program = """
import os
made = 0
try:
    for i in range(100_000): os.mkdir(f'd{i}'); made += 1
except OSError as error: print(error.errno, end=' ')
try:
    fd = os.open('d0/f', os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, 10 << 30)
except OSError as error: print(error.errno, end=' ')
print(made < 10_001)
"""
    assert run(program)["stdout"] in ("28 28 True\n", "28 27 True\n")


@pytest.mark.parametrize("number", [1, 2, 3, 6, 9, 11, 13, 14, 15, 19, 24, 31])
def test_signals_to_itself_end_only_itself(run: Run, number: int) -> None:
    program = f"import os, signal\nif os.fork() == 0:\n    os.kill(os.getpid(), {number})\nos.kill(os.getpid(), {number})"
    result = run(program, options={"time_limit_s": "0.3"})
    assert result["reason"] in ("", "worker_timeout")


@pytest.mark.parametrize(
    "program",
    [
        "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()",
        "x = []\nfor _ in range(100_000): x = [x]\nprint(repr(x))",
        "eval('(' * 5000 + ')' * 5000)",
        "import json; json.loads('[' * 100_000)",
    ],
)
def test_deep_recursion_ends_only_itself(run: Run, program: str) -> None:
    result = run(program, options={"time_limit_s": "0.5"})
    assert not result["run_success"] and result["reason"] in ("", "worker_timeout")


@pytest.mark.parametrize("library", ["", "import numpy\n"])
async def test_a_call_goes_first_when_memory_is_short(judge: JudgeService, library: str) -> None:
    async with JudgeClient(judge.url, time_limit_s=60.0) as client:
        for _ in range(2):  # the second inherits nothing of the first
            call = asyncio.create_task(client.run(library + HELD))
            (process,) = await until_marked(judge, 1)
            assert judge.process is not None
            above = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in _pids_up_to(judge.process.pid, process)]
            await let_go(judge, call)
            assert above[0] == 1000 and set(above[1:]) == {above[-1]} != {1000}, above


def _pids_up_to(last: int, process: psutil.Process) -> Iterator[int]:
    """Of a process and those above it."""
    yield process.pid
    for above in process.parents():
        yield above.pid
        if above.pid == last:
            return


def test_fork_bomb_ends_with_the_call(run: Run) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = run(bomb, options={"time_limit_s": "0.5"})
    assert result["outcome"] in ("timeout", "memory", "killed", "error")


def test_daemons_die_with_the_call(run: Run) -> None:
    program = f"""
import os, sys, signal
reader, writer = os.pipe2(0)
if os.fork() == 0:
    os.close(reader)
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        tell = f'import os, time; os.close({{writer}}); time.sleep(60)'
        os.execv(sys.executable, [sys.executable, '-c', tell, {SURVIVOR!r}])
    os._exit(0)
os.close(writer)
os.read(reader, 1)  # until the daemon runs
print('started')
"""
    result = run(program)
    assert (result["stdout"], result["outcome"]) == ("started\n", "ok")


def test_a_child_that_keeps_stdout_open_does_not_hold_the_slot(run: Run) -> None:
    result = run("import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint('parent done')")
    assert (result["stdout"], result["outcome"]) == ("parent done\n", "ok")


def test_ignored_signals_do_not_stop_the_clock(run: Run) -> None:
    program = """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    result = run(program, options={"time_limit_s": "0.3"})
    assert (result["outcome"], result["reason"]) == ("timeout", "worker_timeout")


def test_killing_everything_hits_only_itself(run: Run) -> None:
    program = """
import os
for pid in [-1, os.getppid(), *range(2, 400)]:
    try: os.kill(pid, 9)
    except OSError: pass
"""
    run(program)  # the fixture checks that the service is well


def test_rlimits_cannot_be_raised(run: Run) -> None:
    program = """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    try: resource.setrlimit(kind, (-1, -1)); print('RAISED', kind)
    except (ValueError, OSError): pass
"""
    assert run(program)["stdout"] == ""


def test_many_processes_cannot_share_out_more_memory(run: Run, layers: set[str]) -> None:
    need(layers, "memory_cgroup")
    program = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(150 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(60)
time.sleep(60)
"""
    result = run(program, options={"time_limit_s": "1"})
    assert result["outcome"] in ("memory", "timeout")
    assert result["peak_memory_bytes"] < 600 << 20


def test_disk_is_bounded(run: Run, layers: set[str]) -> None:
    need(layers, "private_tmpfs")
    program = """
total = 0
for i in range(20):
    with open(str(i), 'wb', buffering=0) as f:
        try:
            while True: total += f.write(bytes(1 << 20))
        except OSError: pass
print(total >> 20)
"""
    assert int(run(program)["stdout"]) <= 64


def test_number_of_files_is_bounded(run: Run, layers: set[str]) -> None:
    need(layers, "private_tmpfs")
    program = "i = 0\ntry:\n  while True: open(str(i), 'w').close(); i += 1\nexcept OSError: print(i)"
    assert int(run(program)["stdout"]) < 10_001


def test_flood_of_output_ends_the_call(run: Run) -> None:
    result = run("import os\nwhile True: os.write(1, bytes(65536))")
    assert (result["outcome"], result["run_success"]) == ("output_limit", False)
    assert len(result["stdout"]) <= 1000


def test_a_program_that_reads_its_own_output_holds_nobody_up() -> None:
    """As it can where it has the slot's uid: what poll() has told is gone at the slot's read()."""
    reader, writer = os.pipe()
    output = Output(reader, 100)
    assert output.read() is False
    os.write(writer, b"word")
    output.close()
    assert output.text() == "word"
    os.close(writer)
