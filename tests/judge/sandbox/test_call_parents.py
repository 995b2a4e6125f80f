"""The processes that calls are forked from: one call leaves nothing to the next, and none outlives its slot."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.judge.programs import in_public_template
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from tests.judge.calls import HELD, until_marked
from tests.judge.conftest import Run
from tests.judge.sandbox.conftest import need

LIBRARIES = ["", "import numpy\n"]  # which of a slot's two call parents is used


@pytest.mark.ci
def test_a_call_ended_at_any_moment_leaves_its_program_to_nobody(tmp_path: Path) -> None:
    program = """
import os, random, time
from rstar2_megatron.judge.sandbox.call_parent import CallParent, make_connection, serve_calls
from rstar2_megatron.judge.sandbox.isolation import IsolationLayers
from rstar2_megatron.judge.sandbox.sandbox import Program

ours, theirs = make_connection()
if os.fork() == 0:
    for fd in ours: os.close(fd)
    serve_calls(theirs, IsolationLayers(), 0)
for fd in theirs: os.close(fd)
parent = CallParent(ours)
null = os.open("/dev/null", os.O_RDONLY)

def start(source):
    reader, writer = os.pipe()
    parent.start(Program("python", source, None, False, os.getcwd(), 10, 1 << 30), (null, writer, writer))
    os.close(writer)
    return reader

def end(reader):
    code = parent.take_end().code
    output = os.read(reader, 1000)
    os.close(reader)
    return code, output

ended = 0
for number in range(3000):  # how many are ended in time depends on the machine's load
    if number >= 200 and ended > 50:
        break
    reader = start("print('victim')")
    time.sleep(random.choice((0.0, random.random() * 0.003)))
    parent.end_call()
    ended += end(reader)[0] != 0
    assert end(start(f"print({number})")) == (0, b"%d\\n" % number), number
print("ended:", ended)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("ended: "), done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 50


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_longer_than_a_message(run: Run, library: str) -> None:
    program = library + "x = 0\n" + "x += 1\n" * 20_000 + "x"
    assert run(program)["stdout"] == "20000\n"


@pytest.mark.parametrize("library", LIBRARIES)
async def test_no_program_or_output_is_in_a_later_calls_memory(judge: JudgeService, library: str) -> None:
    # The word is in two halves here, so that what looks does not find itself.
    look = """
import ctypes
word = b"-".join([b"mark-of", b"another"])
found = 0
for line in open("/proc/self/maps"):
    region, access = line.split()[:2]
    if access.startswith("rw"):
        start, end = (int(part, 16) for part in region.split("-"))
        found += (ctypes.c_char * (end - start)).from_address(start).raw.count(word)
print(found)
"""

    async def in_both_slots(client: JudgeClient, program: str) -> set[str]:
        """Slots take turns."""
        results = [await client.run(library + program) for _ in range(2)]
        assert all(result.ok for result in results), results
        return {result.stdout for result in results}

    async with JudgeClient(judge.url, batch_size=1) as client:
        before = await in_both_slots(client, look)
        told = await in_both_slots(client, "print('mark-of' + '-another')  # mark-of-another")
        assert told == {"mark-of-another\n"}
        assert await in_both_slots(client, look) == before
        here = await in_both_slots(client, "kept = 'mark-of-another'\n" + look)
    assert min(map(int, here)) > max(map(int, before))  # it does find what is there


async def test_a_call_ends_before_its_mount_namespace_is_dropped(judge: JudgeService, layers: set[str]) -> None:
    """Its parent has the namespace too: the kernel drops one only when all cores have rested, which may take 100 ms."""
    need(layers, "private_tmpfs")
    async with JudgeClient(judge.url, time_limit_s=60.0) as client:
        call = asyncio.create_task(client.run(f"open('left', 'w').close()\n{HELD}"))
        (process,) = await until_marked(judge, 1)
        parent = process.parent()
        assert parent is not None
        assert _mount_namespace(process) == _mount_namespace(parent) != _mount_namespace(psutil.Process())
        process.kill()
        assert (await call).outcome == Outcome.KILLED
        for _ in range(2):  # in namespaces of their own, in both slots
            assert (await client.run("import os; os.listdir('.')")).stdout == "['source.py']\n"


def _mount_namespace(process: psutil.Process) -> str:
    return os.readlink(f"/proc/{process.pid}/ns/mnt")


@pytest.mark.parametrize("library", [True, False])
def test_a_program_in_the_public_template_gets_the_parent_that_it_needs(run: Run, library: bool) -> None:
    word = "numpy" if library else "number"
    result = run(in_public_template(f"import sys\nprint('nump' + 'y' in sys.modules)  # {word}"))
    assert result["stdout"] == f"{library}\n", result["stderr"]
