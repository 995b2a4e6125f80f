"""Temporary directories with an owner. The owner removes its directory; if it was killed, a later start does.

An advisory lock shows whether the owner lives. Unlike a process id in the name, it also works between containers that share
the temporary directory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_LOCK = ".owner"
_YOUNG_S = 60.0  # a younger directory without a lock is being created
_held: list[int] = []  # descriptors of the locks; the kernel releases them with the process


def make_owned_directory(prefix: str, parent: str | None = None) -> Path:
    """A new directory PREFIX... in `parent` (default: the temporary directory), owned by this process.

    Stale directories of the prefix are removed first. The owner removes its directory; the lock needs no clean-up.
    """
    sweep_stale_directories(prefix, parent)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(path / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (path / f"{_LOCK}.new").rename(path / _LOCK)  # a sweep never finds a lock that nobody holds yet
    _held.append(lock)
    return path


def sweep_stale_directories(prefix: str, parent: str | None = None) -> list[Path]:
    """Remove this user's directories PREFIX... whose owner has ended. Returns them."""
    swept = []
    for path in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            is_ours = path.lstat().st_uid == os.geteuid() and path.is_dir() and not path.is_symlink()
            if is_ours and not _has_owner(path):
                shutil.rmtree(path, ignore_errors=True)
                swept.append(path)
        except OSError:  # another process has removed it
            continue
    return swept


def _has_owner(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - path.stat().st_mtime < _YOUNG_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
