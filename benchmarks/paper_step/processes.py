"""CPU seconds and peak memory of every process of a run, by what the process is."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

_RAY = ("raylet", "gcs_server", "ray::IDLE", "log_monitor", "dashboard", "ray.scripts", "agent")


class Processes:
    """The processes below this one and their kinds: `known` names some by process id, the others go by command line."""

    def __init__(self, known: dict[int, str]) -> None:
        self._known = {os.getpid(): "driver", **known}

    def cpu(self) -> Counter[str]:
        """CPU seconds since the start of each kind of process, children that have ended included."""
        seconds: Any = Counter()  # a Counter's values are typed as int
        for process in self._all():
            try:
                times = process.cpu_times()
                seconds[self._kind(process)] += times.user + times.system
            except psutil.Error:  # it has ended
                continue
        return seconds

    def peak_mb(self) -> dict[str, int]:
        """The largest resident set of each kind in MiB, shared memory included."""
        peaks: dict[str, int] = {}
        for process in self._all():
            try:
                kind = self._kind(process)
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (psutil.Error, OSError):
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    peaks[kind] = max(peaks.get(kind, 0), int(line.split()[1]) >> 10)
        return peaks

    def forget_peaks(self) -> None:
        """Let `peak_mb` count from here on, where the kernel allows it."""
        for process in self._all():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def _all(self) -> list[psutil.Process]:
        here = psutil.Process()
        return [here, *here.children(recursive=True)]

    def _kind(self, process: psutil.Process) -> str:
        if process.pid in self._known:
            return self._known[process.pid]
        line = " ".join(process.cmdline())
        if "reward.worker" in line:
            return "graders"
        if "ChannelWorker" in line:
            return "channel"
        return "ray" if any(name in line for name in _RAY) else "others"
