"""Processes are ended together with what they started, however they resist."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from rstar2_megatron.services.process import end_child, kill_tree, terminate_tree

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('there', flush=True); time.sleep(600)"
# A parent whose child has a session of its own, and whose other child has left an orphan in the process group.
_FAMILY = f"""
import subprocess, sys, time
command = [sys.executable, "-c", {_STUBBORN!r}]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
middle = "import subprocess, sys; c = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE); c.stdout.readline(); print(c.pid)"
orphan = subprocess.run([sys.executable, "-c", middle, *command], stdout=subprocess.PIPE, text=True).stdout
child.stdout.readline()
print(child.pid, orphan, flush=True)
time.sleep(600)
"""


def start(program: str) -> tuple[subprocess.Popen[bytes], str]:
    """A leader of its own session, and the first line that it prints."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    return process, process.stdout.readline().decode()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(*processes: psutil.Process) -> None:
    """A child that its living parent does not wait for stays a zombie."""
    deadline = time.monotonic() + 10
    while not all(gone(process.pid) for process in processes):
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.01)


def test_a_tree_is_killed_with_its_group_and_its_other_sessions() -> None:
    process, line = start(_FAMILY)
    child, orphan = (psutil.Process(int(word)) for word in line.split())
    assert process.pid in {p.pid for p in kill_tree(process.pid)}
    process.wait(10)
    wait_gone(child, orphan)
    assert kill_tree(process.pid) == [], "one that has ended is no error"


def test_a_spared_root_lives_without_its_descendants() -> None:
    process, line = start(_FAMILY)
    try:
        child = psutil.Process(int(line.split()[0]))
        assert [p.pid for p in kill_tree(process.pid, spare_root=True)] == [child.pid]
        wait_gone(child)
        assert process.poll() is None
    finally:
        kill_tree(process.pid)
        process.wait(10)


@pytest.mark.parametrize("how", ["child", "tree"])
def test_what_ignores_the_signal_is_killed_after_its_grace(how: str) -> None:
    process, _ = start(_STUBBORN)
    if how == "child":
        end_child(process, grace_s=0.2)
        assert process.returncode == -9
    else:
        terminate_tree(process.pid, grace_s=0.2)
        process.wait(10)
    assert gone(process.pid)
