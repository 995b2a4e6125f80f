"""One call: fork, wall in, run, watch, end everything it started, report. Runs in a slot process.

The watcher waits on the process's pidfd and not on the pipes' end: a daemon that keeps stdout open must not
hold the slot. A PID namespace ends all descendants with the call; without one, the slot adopts and ends them.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rstar2_megatron.judge import cpp, isolation, linux, snippet
from rstar2_megatron.judge.cgroup import SlotGroup
from rstar2_megatron.judge.isolation import Walls
from rstar2_megatron.judge.limits import MEGABYTE, CallLimits
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.output import SANDBOX_FAILED, Output, report
from rstar2_megatron.judge.process_tree import Supervision, children, family, own_autogroup, resident_bytes

STEPPED_BACK = bytes(4)  # an empty message to the worker in mid-call: its answer comes later
_CHANNEL = 3  # where a live interpreter finds the socket that its cells come through


def own_address_space() -> int:
    """Bytes of address space of this process: what a call starts with."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class OomScore:
    """How willingly the kernel ends this process when memory is short.

    A child inherits it: to write the parent's twice costs a tenth of opening the child's in its own /proc.
    """

    def __init__(self) -> None:
        self._fd = -1
        # Without /proc, or where what was inherited may not be written again, it is left as it is.
        with contextlib.suppress(OSError):
            fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            self._own = os.pread(fd, 16, 0)
            os.pwrite(fd, self._own, 0)
            self._fd = fd

    def raise_for_fork(self) -> None:
        """What is forked now goes before all others."""
        self._write(b"1000")

    def restore(self) -> None:
        self._write(self._own)

    def _write(self, score: bytes) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, score, 0)


class Sandbox:
    """Forks programs into the walls of one slot, watches and ends them."""

    def __init__(
        self,
        walls: Walls,
        slot: int,
        group: SlotGroup | None,
        scratch: str,
        worker: socket.socket | None = None,
    ) -> None:
        """`scratch` holds working directories where there is no private tmpfs; `worker` becomes readable when
        nobody wants the running call any more, and is told when the call steps back (see Supervision)."""
        self.walls = walls
        self.slot = slot
        self.group = group
        self.scratch = scratch
        self.worker = worker
        self.own_group = own_autogroup()
        self.own_pid_namespace = -1
        if "pid_namespace" in walls.active:
            self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.address_space = own_address_space()
        self.resident_at_start = resident_bytes(os.getpid())
        self.streams = snippet.Streams()
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.oom_score = OomScore()
        # A program may choose any exit code, so it takes this word too to say that the walls failed.
        self.failure_mark = os.urandom(8).hex()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run `job` (type, solution, input, expected_output, files, limits) and return a SubmissionResult."""
        raise NotImplementedError

    def close(self) -> None:
        """End what lives on between calls."""

    def _limit_memory(self, limits: CallLimits) -> int:
        """Set the group's limit. Returns how often the kernel has enforced it so far."""
        if self.group is None:
            return 0
        self.group.set_limit((limits.memory_mb + limits.disk_mb + 32) * MEGABYTE)
        return self.group.kills()

    def _ran_out_of_memory(self, kills_before: int) -> bool:
        return self.group is not None and self.group.kills() > kills_before

    def _make_directory(self) -> str:
        if "private_tmpfs" in self.walls.active:
            return isolation.CALL_DIRECTORY
        import tempfile  # here, because what it imports is no part of a call behind all walls

        directory = tempfile.mkdtemp(prefix="call-", dir=self.scratch)
        if self.walls.uid_base is not None:
            os.chown(directory, self.walls.uid_base + self.slot, -1)
        return directory

    def _remove_directory(self, directory: str) -> None:
        if directory != isolation.CALL_DIRECTORY:
            import shutil

            shutil.rmtree(directory, ignore_errors=True)

    def _fork(
        self,
        job: dict[str, Any],
        limits: CallLimits,
        directory: str,
        channel: socket.socket | None = None,
    ) -> tuple[int, Output, Output]:
        """Start the job's program, or with a `channel` an interpreter that takes its cells from there."""
        stdin = self.null
        if channel is None and job.get("input"):
            stdin = snippet.memory_file(job["input"])
        out_reader, out_writer = os.pipe()
        err_reader, err_writer = os.pipe()
        if self.own_pid_namespace >= 0:
            linux.unshare(linux.CLONE_NEWPID)
        try:
            self.oom_score.raise_for_fork()
            pid = linux.fork()
            if pid == 0:
                for source, target in ((stdin, 0), (out_writer, 1), (err_writer, 2)):
                    os.dup2(source, target)
                if channel is not None:
                    os.dup2(channel.fileno(), _CHANNEL)
                self._become(job, limits, directory, live=channel is not None)
        finally:
            self.oom_score.restore()
            if self.own_pid_namespace >= 0:
                linux.setns(self.own_pid_namespace, linux.CLONE_NEWPID)
            for fd in (out_writer, err_writer, *([stdin] if stdin != self.null else [])):
                os.close(fd)
        kept = limits.output_limit_mb * MEGABYTE
        return pid, Output(out_reader, kept), Output(err_reader, kept)

    def _become(self, job: dict[str, Any], limits: CallLimits, directory: str, *, live: bool) -> NoReturn:
        """The child: raise the walls and run the program. Ends this process."""
        try:
            linux.close_from(_CHANNEL + 1 if live else _CHANNEL)
            # A group of its own, not a session: the kernel may weigh sessions and not processes (autogroup), and
            # then a call's niceness would count for nothing beside other calls.
            os.setpgid(0, 0)
            address_space = self.address_space + limits.memory_mb * MEGABYTE
            isolation.confine_call(
                self.walls, limits, self.slot, directory, address_space, cpu_limit=not live
            )
            if not live:
                snippet.write_files(job.get("files"))
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(2, f"{self.failure_mark}: {error!r}\n".encode())
            os._exit(SANDBOX_FAILED)
        self.failure_mark = ""
        code = 1
        try:
            if job["type"] == "cpp":
                code = cpp.build_and_run(job["solution"], limits)
            else:
                counter = self.streams.use(has_input=bool(job.get("input")))
                sys.path[0] = directory
                sys.argv[:] = [snippet.FILE_NAME]
                reseed()
                if live:
                    snippet.serve_cells(socket.socket(fileno=_CHANNEL), counter)
                else:
                    code = snippet.run_program(job["solution"], counter)
        finally:
            os._exit(code)

    def _watch(
        self,
        pid: int,
        out: Output,
        err: Output,
        deadline: float,
        limits: CallLimits,
        supervision: Supervision,
        done: int = -1,
    ) -> Outcome | None:
        """Wait for the process's end, or for `done` to become readable.

        Returns why it has to be ended, or None when it came to its end by itself.
        """
        watched = os.pidfd_open(pid)
        cancellation = -1 if self.worker is None else self.worker.fileno()
        poller = select.poll()
        streams = {out.fd: out, err.fd: err}
        for fd in (watched, cancellation, done):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        reads_streams = False  # not before the first look: most calls end sooner, and their pipes hold 64 KB
        try:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return Outcome.TIMEOUT
                if now >= supervision.next_look:
                    supervision.look(now)
                    if self.group is None and self._memory_used(pid) > limits.memory_mb * MEGABYTE * 1.5:
                        return Outcome.MEMORY
                    if not reads_streams:
                        reads_streams = True
                        for fd in streams:
                            poller.register(fd, select.POLLIN)
                wait_s = max(0.0, min(deadline, supervision.next_look) - now)
                for fd, _ in poller.poll(wait_s * 1000 + 1):
                    if fd in (watched, done):
                        return None
                    if fd == cancellation:
                        return Outcome.KILLED
                    if not streams[fd].read():
                        poller.unregister(fd)
                    elif streams[fd].is_too_much:
                        return Outcome.OUTPUT_LIMIT
        finally:
            os.close(watched)

    def _step_back(self) -> None:
        """Tell the worker that this call sleeps, or is no short one: another may start beside it."""
        if self.worker is not None:
            with contextlib.suppress(OSError):
                self.worker.sendall(STEPPED_BACK)

    def _memory_used(self, pid: int) -> int:
        """Resident bytes of the call's processes beyond what each inherited."""
        total = 0
        for member in family(pid):
            with contextlib.suppress(OSError, ValueError):
                total += max(0, resident_bytes(member) - self.resident_at_start)
        return total

    def _end(self, pid: int) -> None:
        """End the call's process, and its process group where no PID namespace does that."""
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    def _end_orphans(self) -> None:
        """Without a PID namespace: end what the call left behind. It all became this slot's children."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            orphans = children(os.getpid())
            if not orphans:
                return
            for orphan in orphans:
                with contextlib.suppress(OSError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, 0)


class CallRunner(Sandbox):
    """Runs the calls of one slot, one after another, each in a process of its own."""

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        limits = CallLimits.from_dict(job["limits"])
        kills_before = self._limit_memory(limits)
        directory = self._make_directory()
        try:
            return self._run(job, limits, directory, kills_before)
        finally:
            self._remove_directory(directory)

    def _run(
        self, job: dict[str, Any], limits: CallLimits, directory: str, kills_before: int
    ) -> dict[str, Any]:
        started = time.monotonic()
        pid, out, err = self._fork(job, limits, directory)
        time_limit_s = limits.time_limit_s + (limits.compile_time_s if job["type"] == "cpp" else 0.0)
        supervision = Supervision(pid, started, self.own_group, self._step_back)
        verdict = self._watch(pid, out, err, started + time_limit_s, limits, supervision)
        self._end(pid)
        _, status, usage = os.wait4(pid, 0)
        if self.own_pid_namespace < 0:
            self._end_orphans()
        cost = time.monotonic() - started
        out.close()
        err.close()
        if verdict is None and self._ran_out_of_memory(kills_before):
            verdict = Outcome.MEMORY
        code = os.waitstatus_to_exitcode(status)
        stderr = err.text()
        if code == SANDBOX_FAILED and stderr.startswith(self.failure_mark):
            verdict = Outcome.INTERNAL_ERROR
        return report(
            job,
            limits,
            code,
            verdict,
            cost=cost,
            stdout=out.text(),
            stderr=stderr,
            peak_memory_bytes=usage.ru_maxrss * 1024,
        )


def reseed() -> None:
    """Forked calls would all draw the same numbers: neither module reseeds itself in the child."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
