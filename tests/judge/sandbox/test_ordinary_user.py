"""An ordinary user's judge, with and without the right to namespaces: what one call starts and signals is no other's affair.

The kernel counts no process of root, so another uid than root's is needed, and a Python that it may read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from tests.judge.sandbox.test_environment import REFUSING

ROOT = Path(__file__).resolve().parents[3]
PYTHON = sys.executable
# As uid 12345, to whom the interpreter is shown also where it lies below a directory of root's.
SHOW = """
base=$1; shift
if ! setpriv --reuid=12345 --clear-groups test -r "$base/lib"; then
    mount --bind "$base" /mnt && mount -t tmpfs -o mode=755 none "/$(echo "$base" | cut -d/ -f2)" && mkdir -p "$base" &&
        mount --move /mnt "$base" || exit 1
fi
exec setpriv --reuid=12345 --regid=12345 --clear-groups env HOME=/tmp TMPDIR=/tmp "$@"
"""
USER = ["unshare", "-m", "sh", "-c", SHOW, "sh", sys.base_prefix]
IMPORTS = subprocess.run([*USER, PYTHON, "-c", "import redis, rstar2_megatron"], cwd=ROOT, capture_output=True)
# Namespaces can be made, but not used, as AppArmor has it: nobody maps a uid or mounts.
UNUSABLE = """
import os, sys
from rstar2_megatron.judge.sandbox import linux
linux.no_new_privileges()
linux.do(linux.landlock_steps("/tmp", None, 3, 3))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
# What a judge starts its processes with: as Python, but landlock's scope is unknown, as before Linux 6.12.
OLD_LANDLOCK = """#!/bin/sh
if [ "$1" = -S ]; then
    shift 3
    exec {python} -S -c 'import runpy; from rstar2_megatron.judge.sandbox import linux
linux.LANDLOCK_SCOPE_VERSION = 99
runpy.run_module("rstar2_megatron.judge.sandbox.zygote", run_name="__main__")' "$@"
fi
exec {python} "$@"
"""
JUDGE = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('rstar2_megatron.judge', run_name='__main__')"
THREADS = """
import time
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(100) as pool:
    print(sum(pool.map(lambda i: time.sleep(0.2) or i, range(100))))
"""
BOMB = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        count += 1
except OSError as error: print(error.errno, count, flush=True)
time.sleep(60)
"""
pytestmark = [pytest.mark.ci, pytest.mark.skipif(IMPORTS.returncode != 0, reason="not root, or not with mounts")]


@pytest.fixture(scope="module", params=["namespaces", "none", "unusable"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = Path(tempfile.mkdtemp(prefix="ordinary-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        python = directory / "python"
        python.write_text(OLD_LANDLOCK.format(python=PYTHON))
        python.chmod(0o755)
        refusing = {"none": ["-c", REFUSING, "mount unshare setns"], "unusable": ["-c", UNUSABLE]}.get(request.param, [])
        arguments = ["all", "--workers", "4", "--sessions", "2", "--processes", "1", "--time-limit-s", "4"]
        command = [*USER, PYTHON, *refusing, "-c", JUDGE, str(python), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            try:
                assert process.stdout is not None and process.stderr is not None
                ready = process.stdout.readline()
                assert ready.startswith("judge ready"), process.stderr.read()
                yield ready.split()[-1]
            finally:
                process.terminate()
    finally:
        shutil.rmtree(directory)


async def run(url: str, *programs: str, **options: Any) -> list[tuple[str, str, str]]:
    """Outcome, output and errors of programs that run at the same time."""
    async with JudgeClient(url, time_limit_s=4.0) as client:
        results = await asyncio.gather(*(client.run(program, **options) for program in programs))
    return [(str(result.outcome), result.stdout, result.stderr) for result in results]


@pytest.mark.parametrize("session", [{}, {"session": "threads"}])
async def test_a_call_may_start_as_much_while_two_others_fork_without_end(url: str, session: dict[str, Any]) -> None:
    bombs = asyncio.create_task(run(url, BOMB, BOMB))
    await asyncio.sleep(1.0)
    for _ in range(2):
        ((outcome, out, errors),) = await run(url, THREADS, **session)
        assert (outcome, out) == ("ok", "4950\n"), errors
    assert await bombs == [("timeout", "11 127\n", "")] * 2  # each has its own limit: 128 with itself


@pytest.mark.parametrize("session", [{}, {"session": "signals"}])
async def test_a_call_signals_what_it_started_and_nothing_else(url: str, session: dict[str, Any]) -> None:
    program = f"""
import ctypes, fcntl, os, signal, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*arguments) < 0: raise OSError(ctypes.get_errno(), '')
others = {{os.getppid(), os.getpgid(os.getppid()), {os.getpid()}}} - {{0, os.getpid()}}
reader, writer = os.pipe()
for pid in sorted(others):
    for attempt in (lambda: os.kill(pid, 0), lambda: os.killpg(pid, 0), lambda: os.setpgid(0, pid), lambda: os.pidfd_open(pid),
                    lambda: call(libc.syscall, 234, pid, pid, 0), lambda: call(libc.syscall, 200, pid, 0),
                    lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, pid),
                    lambda: fcntl.fcntl(reader, 15, bytes(4) + pid.to_bytes(4, 'little')),
                    lambda: fcntl.ioctl(reader, 0x8901, pid.to_bytes(4, 'little'))):
        try: print('DONE', pid, attempt())
        except OSError: pass
try: os.kill(-1, 9)
except OSError: print('not all')
pid = os.fork()
if pid == 0: os.setsid(); signal.pause()
while os.getpgid(pid) != pid: pass
os.killpg(pid, 9); print(os.waitpid(pid, 0)[1])
try: subprocess.run([sys.executable, '-c', 'while 1: pass'], timeout=0.2)
except subprocess.TimeoutExpired: print('ended')
signal.signal(signal.SIGUSR1, lambda *_: print('told'))
for tell in (signal.raise_signal, lambda n: os.kill(os.getpid(), n), lambda n: os.kill(0, n),
             lambda n: signal.pthread_kill(threading.get_ident(), n)): tell(signal.SIGUSR1)
"""
    ((outcome, out, errors),) = await run(url, program, **session)
    assert (outcome, out.split("\n")) == ("ok", ["not all", "9", "ended", *["told"] * 4, ""]), (out, errors)
    assert [result[1] for result in await run(url, *["print('well')"] * 6)] == ["well\n"] * 6
