"""Looking at processes that may end at any moment."""

from __future__ import annotations

from pathlib import Path

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Empty for a process that is ending."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def engine_files() -> set[str]:
    """Names in /dev/shm that SGLang's processes made there."""
    return {path.name for pattern in ("sglang_loads_rstar2-*", "sgl_shm_*") for path in Path("/dev/shm").glob(pattern)}


def files_of_dead_engines() -> set[str]:
    """Those of processes that have ended; a living one's are removed once it serves."""
    pids = {name: name.removeprefix("sglang_loads_rstar2-").split("_") for name in engine_files()}
    owner = {name: int(parts[0] if parts[0].isdecimal() else parts[-2]) for name, parts in pids.items()}
    return {name for name, pid in owner.items() if not psutil.pid_exists(pid)}
