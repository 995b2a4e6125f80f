"""Control groups of version 2, as far as this machine has them: the freezer, and controllers where a group has processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rstar2_megatron.judge.sandbox import cgroup


@pytest.fixture
def group() -> Iterator[Path]:
    """A group with one process."""
    try:
        parent = cgroup._own_unified_directory()
        made = parent / f"rstar2-test-{os.getpid()}"
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no groups of version 2 can be made: {error}")
    process = subprocess.Popen(["sleep", "60"])
    (made / "cgroup.procs").write_text(str(process.pid))
    yield made
    process.kill()
    process.wait()
    for path in (*made.glob("*/"), made):
        path.rmdir()


def test_a_group_with_processes_passes_its_controllers_on(group: Path) -> None:
    allowed = (group.parent / "cgroup.controllers").read_text().split()
    controller = next((name for name in ("memory", "hugetlb") if name in allowed), None)
    if controller is None:
        pytest.skip("no memory controller of version 2 (nor hugetlb, which has the same rules)")
    had = controller in (group.parent / "cgroup.subtree_control").read_text().split()
    try:
        cgroup._enable(controller, group.parent)
        (process,) = (group / "cgroup.procs").read_text().split()
        cgroup._enable(controller, group)
        assert controller in (group / "cgroup.subtree_control").read_text()
        others = group / "rstar2-judge-others"
        assert (others / "cgroup.procs").read_text().split() == [process]
        assert controller in (others / "cgroup.controllers").read_text()  # limits of the group hold for it
        (group / "child").mkdir()
        assert controller in (group / "child" / "cgroup.controllers").read_text()
    finally:
        (group / "cgroup.subtree_control").write_text(f"-{controller}")
        if not had:
            with contextlib.suppress(OSError):  # another test may use it
                (group.parent / "cgroup.subtree_control").write_text(f"-{controller}")


def test_a_process_of_a_stopped_group_can_be_killed(group: Path) -> None:
    """A session may end while it is stopped, with its worker for example."""
    (pid,) = map(int, (group / "cgroup.procs").read_text().split())
    (group / cgroup._FREEZE).write_text("1")
    deadline = time.monotonic() + 5
    while "frozen 1" not in (group / "cgroup.events").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    while (group / "cgroup.procs").read_text():
        assert time.monotonic() < deadline, "a frozen process did not end"
        time.sleep(0.01)
