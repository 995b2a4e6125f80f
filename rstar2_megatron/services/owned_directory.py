"""Temporary directories that carry their owner's process id, so that a later start can remove what a kill left."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def make_owned_directory(prefix: str) -> Path:
    """A new directory PREFIX<process id>-... in the machine's temporary directory. Sweeps stale ones first."""
    sweep_stale_directories(prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


def sweep_stale_directories(prefix: str) -> list[Path]:
    """Remove this user's directories PREFIX<process id>-... whose process is gone. Returns them."""
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
        owner = path.name.removeprefix(prefix).split("-")[0]
        try:
            is_ours = path.lstat().st_uid == os.geteuid() and path.is_dir() and not path.is_symlink()
        except OSError:  # another start was quicker
            continue
        if is_ours and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept
