"""The processes that calls are forked from: one call leaves nothing to the next, and none outlives its slot."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.judge.programs import in_public_template
from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.judge.outcome import Outcome
from tests.judge.conftest import Run
from tests.judge.waiting import until
from tests.judge.worker.test_faults import busy_slots, gone

LIBRARIES = ["", "import numpy\n"]  # which of a slot's two call parents is used


@pytest.fixture(scope="module")
def single() -> Iterator[JudgeService]:
    with JudgeService(workers=1, time_limit_s=10.0) as service:
        yield service


def test_a_call_ended_at_any_moment_leaves_its_program_to_nobody() -> None:
    program = """
import os, random, time
from rstar2_megatron.judge.sandbox.call_parent import CallParent, make_connection, serve_calls
from rstar2_megatron.judge.sandbox.isolation import SandboxLimits, IsolationLayers
from rstar2_megatron.judge.limits import CallLimits
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
    limits = SandboxLimits.of(CallLimits(), "/tmp")
    parent.start(Program("python", source, None, False, limits, 10, 1 << 30), (null, writer, writer))
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("ended: "), done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 50


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_program_longer_than_a_message(run: Run, library: str) -> None:
    program = library + "x = 0\n" + "x += 1\n" * 20_000 + "x"
    assert run(program)["stdout"] == "20000\n"


@pytest.mark.parametrize("library", LIBRARIES)
async def test_no_program_or_output_is_in_a_later_calls_memory(single: JudgeService, library: str) -> None:
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
    async with JudgeClient(single.url) as client:
        before = await client.run(library + look)
        told = await client.run(library + "print('mark-of' + '-another')  # mark-of-another")
        assert told.stdout == "mark-of-another\n"
        after = await client.run(library + look)
        here = await client.run(library + "kept = 'mark-of-another'\n" + look)
    assert before.ok and after.stdout == before.stdout, before.stderr
    assert int(here.stdout) > int(before.stdout)  # it does find what is there


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_call_does_not_outlive_its_slot(single: JudgeService, library: str) -> None:
    async with JudgeClient(single.url, time_limit_s=10.0) as client:
        call = asyncio.create_task(client.run(library + "import time; time.sleep(60)"))
        await until(lambda: busy_slots(single), "the call runs")
        parent = busy_slots(single)[0]
        (process,) = parent.children()
        # zygote > slot > call parent, and zygote > library zygote > call parent
        zygote = parent.parents()[1]
        (slot,) = [p for p in zygote.children() if _is_slot(p)]
        slot.send_signal(signal.SIGKILL)
        await until(lambda: gone(process), "its call has ended", timeout_s=5.0)
        await until(lambda: gone(parent), "its call parent has ended", timeout_s=5.0)
        call.cancel()  # it is being done once more
        await asyncio.gather(call, return_exceptions=True)
        assert (await client.run(library + "1 + 1")).stdout == "2\n"


async def test_a_call_ends_before_its_mount_namespace_is_dropped(single: JudgeService) -> None:
    """Its parent has the namespace too: the kernel drops one only when all cores have rested, which may take 100 ms."""
    async with JudgeClient(single.url, time_limit_s=10.0) as client:
        if "private_tmpfs" not in await _layers(single):
            pytest.skip("this machine gives calls no mount namespaces")
        call = asyncio.create_task(client.run("open('left', 'w').close(); import time; time.sleep(60)"))
        await until(lambda: busy_slots(single), "the call runs")
        parent = busy_slots(single)[0]
        (process,) = parent.children()
        assert _mount_namespace(process) == _mount_namespace(parent) != _mount_namespace(psutil.Process())
        process.kill()
        assert (await call).outcome == Outcome.KILLED
        assert (await client.run("import os; os.listdir('.')")).stdout == "[]\n"  # in a namespace of its own


def _mount_namespace(process: psutil.Process) -> str:
    return os.readlink(f"/proc/{process.pid}/ns/mnt")


async def _layers(service: JudgeService) -> list[str]:
    async with httpx.AsyncClient() as http:
        (worker,) = (await http.get(f"{service.url}/status")).json()["workers"].values()
    return list(worker["isolation"]["active"])


def _is_slot(process: psutil.Process) -> bool:
    """Not the library zygote, which has imported numpy."""
    return "numpy" not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("library", [True, False])
def test_a_program_in_the_public_template_gets_the_parent_that_it_needs(run: Run, library: bool) -> None:
    word = "numpy" if library else "number"
    result = run(in_public_template(f"import sys\nprint('nump' + 'y' in sys.modules)  # {word}"))
    assert result["stdout"] == f"{library}\n", result["stderr"]
