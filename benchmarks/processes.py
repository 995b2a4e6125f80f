"""CPU seconds and memory of all that this process has started, by kind of process."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable

import psutil


class Descendants:
    """Sums over looks. Memory is the proportional set size in GB: pages that processes share count once."""

    def __init__(self, kind_of: Callable[[psutil.Process], str]) -> None:
        self._kind_of = kind_of
        self._cpu: dict[tuple[int, float], tuple[str, float]] = {}
        self.peak_gb: dict[str, float] = {}  # when the sum was largest
        self.largest_gb: dict[str, float] = defaultdict(float)

    def look(self) -> None:
        now: dict[str, float] = defaultdict(float)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                kind, times = self._kind_of(process), process.cpu_times()
                self._cpu[process.pid, process.create_time()] = kind, times.user + times.system
                now[kind] += process.memory_full_info().pss / 1e9
        for kind, size in now.items():
            self.largest_gb[kind] = max(self.largest_gb[kind], size)
        if sum(now.values()) > sum(self.peak_gb.values()):
            self.peak_gb = dict(now)

    def cpu_s(self) -> dict[str, float]:
        """Of all processes that were seen, also of those that have ended."""
        spent: dict[str, float] = defaultdict(float)
        for kind, seconds in self._cpu.values():
            spent[kind] += seconds
        return dict(spent)
