"""A killed owner's directory goes at the next start; a living owner's stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rstar2_megatron.services.owned_directory import make_owned_directory

OWNER = (
    "import sys, time\nfrom rstar2_megatron.services.owned_directory import make_owned_directory\n"
    "print(make_owned_directory('owned-', sys.argv[1]), flush=True)\ntime.sleep(60)"
)


def start_owner(parent: Path) -> tuple[subprocess.Popen[bytes], Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().decode().strip())


def test_only_a_dead_owners_directory_is_swept(tmp_path: Path) -> None:
    dead, left = start_owner(tmp_path)
    living, held = start_owner(tmp_path)
    try:
        dead.kill()
        dead.wait()
        (left / "data").write_text("x")
        being_made = tmp_path / "owned-young"
        being_made.mkdir()
        ours = make_owned_directory("owned-", str(tmp_path))
        assert not left.exists() and held.is_dir() and being_made.is_dir() and ours.is_dir()
    finally:
        for owner in (dead, living):
            owner.kill()
            owner.wait()
            assert owner.stdout is not None
            owner.stdout.close()
