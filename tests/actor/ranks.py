"""Rank processes that stay alive for a whole test module, so that torch and megatron are imported once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any


def _serve(rank: int, requests: Any, results: Any, threads: Any, prepare: Callable[[], None]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    prepare()
    while True:
        # gloo keeps the sockets of a group until its last reference goes, and megatron-core's objects form cycles:
        # uncollected, twenty layouts in one process reach an ordinary user's limit of 1,024 open files, and what
        # collection does not reach after a hundred reaches it too.
        gc.collect()
        request = requests.get()
        if request is None:
            return
        function, world_size, init_method, args = request
        try:
            results.put((rank, True, function(rank, world_size, init_method, *args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
        finally:
            threads.value = len(os.listdir("/proc/self/task"))


# Of a rank between two runs. A model with experts leaves its process groups behind, whose gloo threads poll: after 40
# layouts a rank had 881 threads, and steps took ten times as long.
_MOST_THREADS = 150


def nothing() -> None:
    """Ranks that need no preparation."""


class RankPool:
    """`run(f, n, *args)` calls f(rank, n, init_method, *args) in n processes; results come by rank."""

    def __init__(self, prepare: Callable[[], None] = nothing) -> None:
        """prepare: called first in every process."""
        self._prepare = prepare
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._requests: list[Any] = []
        self._threads: list[Any] = []
        self._results: Any = self._context.Queue()
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._runs = 0

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
        if any(threads.value > _MOST_THREADS for threads in self._threads):
            self.close()
        while len(self._processes) < world_size:
            requests = self._context.Queue()
            rank = len(self._processes)
            threads = self._context.Value("i", 0)
            arguments = (rank, requests, self._results, threads, self._prepare)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._threads.append(threads)
            self._processes.append(process)
            self._requests.append(requests)
        # A file, not a port: between choosing one and rank 0 listening on it another test may take it.
        self._runs += 1
        init_method = f"file://{self._directory.name}/{self._runs}"
        for rank in range(world_size):
            self._requests[rank].put((function, world_size, init_method, args))
        try:
            done, failed = self._collect(world_size, time.monotonic() + timeout_s)
        except BaseException:
            # pytest's time limit comes here too. Ranks that still compute would hand the next run their late results.
            self.close()
            raise
        if failed:
            raise RuntimeError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return [done[rank] for rank in range(world_size)]

    def _collect(self, world_size: int, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and tracebacks by rank."""
        done: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while len(done) + len(failed) < world_size:
            try:
                rank, ok, value = self._results.get(timeout=1.0)
            except queue.Empty:
                dead = [i for i in range(world_size) if not self._processes[i].is_alive()]
                if dead or time.monotonic() > deadline:
                    if failed:  # the others wait for the failed one
                        self.close()
                        break
                    raise TimeoutError(f"ranks done {sorted(done)} of {world_size}, dead {dead}") from None
                continue
            if ok:
                done[rank] = value
            else:
                failed[rank] = value
                deadline = min(deadline, time.monotonic() + 5.0)
        return done, failed

    def kill(self) -> None:
        """SIGKILL every rank, as a machine that fails would; a `run` under way raises TimeoutError."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(5)
        self._processes, self._requests, self._threads = [], [], []
        self._results = self._context.Queue()
