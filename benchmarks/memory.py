"""Peak resident memory of this process, from the kernel's counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")


def status_bytes(name: str) -> float:
    """A size of /proc/self/status, e.g. VmRSS (held now) or VmHWM (held at most)."""
    return float(_STATUS.read_text().split(f"{name}:")[1].split()[0]) * 1024


def start_peak() -> float:
    """Begin a new high-water mark; what is held now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def resident_peak_gb(function: Callable[[], object]) -> dict[str, float]:
    """GB (of 1e9 bytes) that `function` took at most beyond what was held, GB of the process in all, and its seconds."""
    before, started = start_peak(), time.perf_counter()
    function()
    peak = status_bytes("VmHWM")
    return {"own_peak_gb": (peak - before) / 1e9, "process_peak_gb": peak / 1e9, "seconds": time.perf_counter() - started}
