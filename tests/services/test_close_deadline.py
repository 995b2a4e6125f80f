"""A clean-up that never returns: everything ends all the same, with the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_PROGRAM = """
import subprocess, sys, threading, time
from pathlib import Path
import psutil
from rstar2_megatron.services.close_deadline import close_deadline

where, seconds, hangs = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "hangs"
child = subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"])
(where / "files").mkdir()
while not (family := psutil.Process().children(recursive=True))[1:]:  # the child's own child too
    time.sleep(0.02)
(where / "family").write_text(" ".join(str(process.pid) for process in family))
with close_deadline(seconds, 143, (where / "files").rmdir, where / "close.log"):
    if hangs:
        threading.Event().wait()
    for process in family:
        process.kill()
    child.wait()
sys.exit(7)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("how", "code", "seconds"), [("hangs", 143, 1.0), ("ends", 7, 300.0)])
def test_a_clean_up_that_hangs_is_ended_with_all_its_processes(tmp_path: Path, how: str, code: int, seconds: float) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), str(seconds), how], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == code, ended.stderr
    by_force = how == "hangs"
    family = (tmp_path / "family").read_text().split()
    assert len(family) == 2 and not [pid for pid in family if is_running(int(pid))]
    assert (tmp_path / "files").exists() is not by_force
    assert ("ended by force" in ended.stderr) is by_force
    if by_force:
        assert "<module>" in (tmp_path / "close.log").read_text()  # it says where it hung
