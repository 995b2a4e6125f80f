"""One call: fork, wall in, run, watch, end everything it started, report. Runs in a slot process.

The watcher waits on the process's pidfd and not on the pipes' end: a daemon that keeps stdout open must not
hold the slot. A PID namespace ends all descendants with the call; without one, the slot adopts and ends them.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from rstar2_megatron.judge import cpp, isolation, linux, snippet
from rstar2_megatron.judge.cgroup import SlotGroup
from rstar2_megatron.judge.isolation import Walls
from rstar2_megatron.judge.limits import MEGABYTE, CallLimits
from rstar2_megatron.judge.outcome import Outcome, make_result

_SLICE_S = 0.3  # a call that has used this much CPU is demoted, so that short calls pass it
_DEMOTED_NICENESS = 10
_WATCH_S = 0.1  # between two looks at a call that runs longer than a slice
_READ_SIZE = 1 << 16
_SANDBOX_FAILED = 250  # exit code of a child whose walls could not be raised


def own_address_space() -> int:
    """Bytes of address space of this process: what a call starts with."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


class Output:
    """What one stream of the call wrote, bounded."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.parts: list[bytes] = []
        self.size = 0

    def read(self) -> bool:
        """Take what is there. False at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return True
        self.parts.append(data)
        self.size += len(data)
        return bool(data)

    def drain(self, limit: int) -> None:
        """Take what is left in the pipe without waiting for writers that may live on."""
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):
            while self.size <= limit:
                before = self.size
                if not self.read() or self.size == before:
                    break
        os.close(self.fd)

    def text(self) -> str:
        return b"".join(self.parts).decode("utf-8", "backslashreplace")


def shorten(text: str, limit: int) -> tuple[str, bool]:
    """At most `limit` characters, head and tail kept around a note. Returns whether it was cut."""
    if len(text) <= limit:
        return text, False
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    room = limit - len(note)
    if room < 20:
        return text[:limit], True
    head = room - room // 2
    return text[:head] + note + text[len(text) - room // 2 :], True


class CallRunner:
    """Runs the calls of one slot, one after another."""

    def __init__(
        self,
        walls: Walls,
        slot: int,
        group: SlotGroup | None,
        scratch: str,
        cancellation: socket.socket | None = None,
    ) -> None:
        """`scratch` holds working directories where there is no private tmpfs;
        `cancellation` becomes readable when nobody wants the running call any more."""
        self.walls = walls
        self.slot = slot
        self.group = group
        self.scratch = scratch
        self.cancellation = -1 if cancellation is None else cancellation.fileno()
        self.own_pid_namespace = -1
        if "pid_namespace" in walls.active:
            self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.address_space = own_address_space()
        self.resident_at_start = _resident_bytes(os.getpid())
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run `job` (type, solution, input, expected_output, limits) and return a SubmissionResult."""
        limits = CallLimits.from_dict(job["limits"])
        if self.group is not None:
            self.group.set_limit((limits.memory_mb + limits.disk_mb + 32) * MEGABYTE)
        directory = isolation.CALL_DIRECTORY
        if "private_tmpfs" not in self.walls.active:
            directory = tempfile.mkdtemp(prefix="call-", dir=self.scratch)
            if self.walls.uid_base is not None:
                os.chown(directory, self.walls.uid_base + self.slot, -1)
        try:
            return self._run(job, limits, directory)
        finally:
            if directory != isolation.CALL_DIRECTORY:
                shutil.rmtree(directory, ignore_errors=True)

    def _run(self, job: dict[str, Any], limits: CallLimits, directory: str) -> dict[str, Any]:
        kills_before = self.group.kills() if self.group is not None else 0
        started = time.monotonic()
        pid, out, err = self._fork(job, limits, directory)
        time_limit_s = limits.time_limit_s + (limits.compile_time_s if job["type"] == "cpp" else 0.0)
        verdict = self._watch(pid, out, err, started + time_limit_s, limits)
        self._end(pid)
        _, status, usage = os.wait4(pid, 0)
        if self.own_pid_namespace < 0:
            self._end_orphans()
        cost = time.monotonic() - started
        output_limit = limits.output_limit_mb * MEGABYTE
        out.drain(output_limit)
        err.drain(output_limit)
        if self.group is not None and verdict is None and self.group.kills() > kills_before:
            verdict = Outcome.MEMORY
        code = os.waitstatus_to_exitcode(status)
        return self._report(job, limits, code, verdict, cost, out.text(), err.text(), usage.ru_maxrss * 1024)

    def _fork(self, job: dict[str, Any], limits: CallLimits, directory: str) -> tuple[int, Output, Output]:
        stdin = self.null
        if job.get("input"):
            stdin = os.memfd_create("stdin", os.MFD_CLOEXEC)
            data = memoryview(job["input"].encode("utf-8", "surrogatepass"))
            while data:
                data = data[os.write(stdin, data) :]
            os.lseek(stdin, 0, os.SEEK_SET)
        out_reader, out_writer = os.pipe()
        err_reader, err_writer = os.pipe()
        if self.own_pid_namespace >= 0:
            linux.unshare(linux.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                for source, target in ((stdin, 0), (out_writer, 1), (err_writer, 2)):
                    os.dup2(source, target)
                self._become(job, limits, directory)
        finally:
            if self.own_pid_namespace >= 0:
                linux.setns(self.own_pid_namespace, linux.CLONE_NEWPID)
            for fd in (out_writer, err_writer, *([stdin] if stdin != self.null else [])):
                os.close(fd)
        return pid, Output(out_reader), Output(err_reader)

    def _become(self, job: dict[str, Any], limits: CallLimits, directory: str) -> NoReturn:
        """The child: raise the walls and run the program. Ends this process."""
        code = _SANDBOX_FAILED
        try:
            linux.close_from(3)
            os.setsid()
            address_space = self.address_space + limits.memory_mb * MEGABYTE
            isolation.confine_call(self.walls, limits, self.slot, directory, address_space)
            if job["type"] == "cpp":
                code = cpp.build_and_run(job["solution"], limits)
            else:
                counter = snippet.open_standard_streams()
                sys.path[0] = directory
                sys.argv[:] = [snippet.FILE_NAME]
                reseed()
                code = snippet.run_program(job["solution"], counter)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(2, f"the sandbox could not start the program: {error!r}\n".encode())
        finally:
            os._exit(code)

    def _watch(
        self, pid: int, out: Output, err: Output, deadline: float, limits: CallLimits
    ) -> Outcome | None:
        """Wait for the process's end. Returns why it has to be ended, or None when it ended by itself."""
        watched = os.pidfd_open(pid)
        poller = select.poll()
        streams = {out.fd: out, err.fd: err}
        for fd in (watched, out.fd, err.fd, self.cancellation):
            if fd < 0:
                continue
            poller.register(fd, select.POLLIN)
        output_limit = limits.output_limit_mb * MEGABYTE
        next_look = time.monotonic() + _SLICE_S
        demoted = False
        try:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return Outcome.TIMEOUT
                if now >= next_look:
                    next_look = now + _WATCH_S
                    if not demoted and cpu_seconds(pid) > _SLICE_S:
                        demoted = True
                        with contextlib.suppress(OSError):
                            os.setpriority(os.PRIO_PGRP, pid, _DEMOTED_NICENESS)
                    if self.group is None and self._memory_used(pid) > limits.memory_mb * MEGABYTE * 1.5:
                        return Outcome.MEMORY
                    if demoted and self.group is not None:
                        next_look = deadline  # the control group watches memory: nothing left to look at
                wait_s = min(deadline, next_look) - now
                for fd, _ in poller.poll(wait_s * 1000 + 1):
                    if fd == watched:
                        return None
                    if fd == self.cancellation:
                        return Outcome.KILLED
                    if not streams[fd].read():
                        poller.unregister(fd)
                    elif streams[fd].size > output_limit:
                        return Outcome.OUTPUT_LIMIT
        finally:
            os.close(watched)

    def _memory_used(self, pid: int) -> int:
        """Resident bytes of the call's processes beyond what each inherited."""
        total, stack = 0, [pid]
        while stack:
            current = stack.pop()
            with contextlib.suppress(OSError, ValueError):
                total += max(0, _resident_bytes(current) - self.resident_at_start)
                stack += map(int, Path(f"/proc/{current}/task/{current}/children").read_text().split())
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
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            if not children:
                return
            for child in children:
                with contextlib.suppress(OSError):
                    os.kill(int(child), signal.SIGKILL)
                    os.waitpid(int(child), 0)

    def _report(
        self,
        job: dict[str, Any],
        limits: CallLimits,
        code: int,
        verdict: Outcome | None,
        cost: float,
        stdout: str,
        stderr: str,
        peak_memory_bytes: int,
    ) -> dict[str, Any]:
        ended_by = -code if code < 0 else None
        if verdict is None:
            if code == 0:
                verdict = Outcome.OK
            elif code == _SANDBOX_FAILED:
                verdict = Outcome.INTERNAL_ERROR
            elif ended_by == signal.SIGXCPU:
                verdict = Outcome.TIMEOUT
            elif ended_by is not None:
                verdict = Outcome.KILLED
            elif "MemoryError" in stderr[stderr.rstrip().rfind("\n") + 1 :]:
                verdict = Outcome.MEMORY
            else:
                verdict = Outcome.ERROR
        expected = job.get("expected_output")
        success = verdict is Outcome.OK and (expected is None or stdout.strip() == expected.strip())
        shown_out, cut_out = shorten(stdout, limits.output_chars)
        shown_err, cut_err = shorten(stderr, limits.output_chars)
        return make_result(
            job.get("sub_id"),
            verdict,
            cost=cost,
            stdout=shown_out,
            stderr=shown_err,
            exit_code=code if code >= 0 else 128 - code,
            signal=ended_by,
            truncated=cut_out or cut_err,
            peak_memory_bytes=peak_memory_bytes,
            queue_seconds=job.get("queue_seconds"),
            worker=job.get("worker"),
            success=success,
        )


def reseed() -> None:
    """Forked calls would all draw the same numbers: numpy, unlike `random`, does not reseed in a child."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))


def cpu_seconds(pid: int) -> float:
    """CPU used by a process so far."""
    with contextlib.suppress(OSError):
        return time.clock_gettime(((~pid) << 3) | 2)
    return 0.0


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
