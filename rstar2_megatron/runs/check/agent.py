"""Runs programs of checks in processes of one node, under a deadline. Ray carries one of these to every node."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
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
        with tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())
            command = [sys.executable, "-m", "rstar2_megatron.runs.check.process", str(theirs.fileno())]
            self.process = start_child(command, log, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        size = os.fstat(self._log).st_size
        return os.pread(self._log, _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace")

    def end(self) -> None:
        self.connection.close()
        terminate_tree(self.process.pid, grace_s=_END_S)
        self.process.wait(10)
        os.close(self._log)


class NodeAgent:
    """The processes of one node, by the accelerators that they see. Without `visible` they are numbered as the driver's."""

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
        answers: dict[int, Answer] = {}
        for number, job in enumerate(jobs):
            try:
                processes[number].connection.send((program, job, arguments))
            except OSError as error:
                answers[number] = Answer(job.rank, job.node, error=f"the process is gone: {error}")
        deadline = time.monotonic() + deadline_s
        while len(answers) < len(jobs) and time.monotonic() < deadline:
            for number, job in enumerate(jobs):
                if number not in answers and (answer := _take(processes[number], job)) is not None:
                    answers[number] = answer
                    if answer.error:
                        deadline = min(deadline, time.monotonic() + _OTHERS_S)
            time.sleep(0.02)
        for number, job in enumerate(jobs):
            if number not in answers:
                said = f"rank {job.rank} did not answer within its deadline of {deadline_s:.0f} s and was ended"
                answers[number] = Answer(job.rank, job.node, error=said, log=processes[number].log())
                self._end(keys[number])
            elif not processes[number].alive():
                self._end(keys[number])
        return [answers[number] for number in range(len(jobs))]

    def _process(self, job: Job, key: tuple[int, ...]) -> _Process:
        known = self._processes.get(key)
        if known is not None and not known.alive():
            self._end(key)
        if key not in self._processes:
            devices = job.devices if job.device == "cuda" else ()
            self._processes[key] = _Process(devices, self._visible)
        return self._processes[key]

    def _end(self, key: tuple[int, ...]) -> None:
        self._processes.pop(key).end()

    def close(self) -> None:
        """End all processes: their memory is free for others. Runs after it start new ones."""
        for key in list(self._processes):
            self._end(key)


def _take(process: _Process, job: Job) -> Answer | None:
    """The answer of a process, once it is there."""
    connection: Connection = process.connection
    try:
        if connection.poll():
            ok, value = connection.recv()
            if ok:
                return Answer(job.rank, job.node, value=value)
            return Answer(job.rank, job.node, error=value, log=process.log())
    except (EOFError, OSError):
        pass
    else:
        if process.alive():
            return None
    try:
        code: object = process.process.wait(2)
    except subprocess.TimeoutExpired:
        code = "none yet"
    return Answer(job.rank, job.node, error=f"the process died (exit code {code})\n{process.log()}", log=process.log())
