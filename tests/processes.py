"""Looking at processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Empty for a process that is ending."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
