"""SGLang's named files in /dev/shm, which it leaves behind: its processes are ended by SIGKILL.

An engine removes their names as soon as all of its processes have them open; the memory then goes with the last of them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

DIRECTORY = Path("/dev/shm")


def instance_id(pid: int) -> str:
    """SGLang's name of the instance of engine process `pid`, part of its file's name."""
    return f"rstar2-{pid}"


def remove(pid: int) -> None:
    """Remove the names of engine process `pid` and its descendants: load figures, queues between tensor-parallel ranks."""
    family = [pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += [process.pid for process in psutil.Process(pid).children(recursive=True)]
    patterns = [f"sglang_loads_{instance_id(pid)}_*", *(f"sgl_shm_*_{member}_*" for member in family)]
    for pattern in patterns:
        for path in DIRECTORY.glob(pattern):
            path.unlink(missing_ok=True)
