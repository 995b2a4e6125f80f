"""Runs programs of checks in processes of one node, under a deadline. Ray carries one of these to every other node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from rstar2_megatron.runs.check.process import Job
from rstar2_megatron.services.process import free_port, start_child, terminate_tree

_OTHERS_S = 5.0  # what the other ranks of a program may still take when one has failed
_END_S = 75.0  # in which a whole run ends what it started; all other programs end at once
_LOG_TAIL = 4000


@dataclass(frozen=True)
class Answer:
    """The answer of one process; `error` is "" or a traceback, or says that the process died or took too long."""

    rank: int
    node: int
    value: Any = None
    error: str = ""
    log: str = ""


class _Process:
    """One process and the accelerators that it sees."""

    def __init__(self, devices: tuple[int, ...], visible: str | None) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if devices:
            named = visible.split(",") if visible else [str(device) for device in range(max(devices) + 1)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(named[device] for device in devices)
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  `end` closes it
        command = [sys.executable, "-m", "rstar2_megatron.runs.check.process", str(theirs.fileno())]
        self.process = start_child(command, self._log, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def take(self, job: Job) -> Answer:
        """The answer, once `connection` is ready: it is at its end when the process died."""
        try:
            done, value = self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
            value, done = f"the process died (exit code {self.process.returncode})\n{self.log()}", False
        return Answer(job.rank, job.node, value=value) if done else Answer(job.rank, job.node, error=value, log=self.log())

    def log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace")

    def end(self) -> None:
        self.connection.close()
        terminate_tree(self.process.pid, grace_s=_END_S)
        self.process.wait(10)
        self._log.close()


class NodeAgent:
    """The processes of one node, by the accelerators that they see.

    visible: the driver's CUDA_VISIBLE_DEVICES, whose numbers jobs name; None: they name those of the node.
    """

    def __init__(self, visible: str | None = None) -> None:
        self._visible = visible
        self._processes: dict[tuple[int, ...], _Process] = {}

    def free_port(self, host: str) -> int:
        return free_port(host)

    def run(self, program: str, jobs: Sequence[Job], arguments: dict[str, Any], deadline_s: float) -> list[Answer]:
        """Run "module:function" once for every job, side by side; answers in the order of the jobs. Never raises.

        What has not answered after `deadline_s` is killed, and what waits for a rank that failed soon after it.
        """
        keys = [job.devices or (-1 - number,) for number, job in enumerate(jobs)]
        processes = [self._process(job, key) for job, key in zip(jobs, keys, strict=True)]
        for process, job in zip(processes, jobs, strict=True):
            with contextlib.suppress(OSError):  # it died: `take` says so
                process.connection.send((program, job, arguments))
        answers: dict[int, Answer] = {}
        waiting: dict[Any, int] = {process.connection: number for number, process in enumerate(processes)}
        deadline = time.monotonic() + deadline_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                number = waiting.pop(connection)
                answers[number] = processes[number].take(jobs[number])
                if answers[number].error:
                    deadline = min(deadline, time.monotonic() + _OTHERS_S)
        for number in waiting.values():
            job = jobs[number]
            said = f"rank {job.rank} did not answer within its deadline of {deadline_s:.0f} s and was ended"
            answers[number] = Answer(job.rank, job.node, error=said, log=processes[number].log())
            self._processes.pop(keys[number]).end()
        return [answers[number] for number in range(len(jobs))]

    def _process(self, job: Job, key: tuple[int, ...]) -> _Process:
        known = self._processes.get(key)
        if known is not None and known.process.poll() is not None:
            self._processes.pop(key).end()
        if key not in self._processes:
            devices = job.devices if job.device == "cuda" else ()
            self._processes[key] = _Process(devices, self._visible)
        return self._processes[key]

    def close(self) -> None:
        """End all processes: their memory is free for others. Runs after it start new ones."""
        while self._processes:
            self._processes.popitem()[1].end()
