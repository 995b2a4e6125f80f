"""Control groups of version 2, as far as this machine has them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rstar2_megatron.judge.sandbox import cgroup


@pytest.fixture
def group() -> Iterator[Path]:
    """A group with one process."""
    try:
        parent = cgroup.own_unified_directory()
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
    controller = next((name for name in ("hugetlb", "memory") if name in allowed), None)
    if controller is None:
        pytest.skip("no memory controller of version 2 (nor hugetlb, which has the same rules, and which no judge uses)")
    had = controller in (group.parent / "cgroup.subtree_control").read_text().split()
    try:
        cgroup.enable(controller, group.parent)
        (process,) = (group / "cgroup.procs").read_text().split()
        cgroup.enable(controller, group)
        assert controller in (group / "cgroup.subtree_control").read_text()
        others = group / "rstar2-judge-others"
        assert (others / "cgroup.procs").read_text().split() == [process]
        assert controller in (others / "cgroup.controllers").read_text()  # limits of the group hold for it
        (group / "child").mkdir()
        assert controller in (group / "child" / "cgroup.controllers").read_text()
    finally:
        (group / "cgroup.subtree_control").write_text(f"-{controller}")
        if not had and controller == "hugetlb":  # judges that run elsewhere need the other
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.subtree_control").write_text(f"-{controller}")
