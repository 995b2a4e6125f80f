"""A slot's process: receives jobs through a socket, runs one at a time, ends everything that it started, answers.

The watcher waits for the end of the process, not of its pipes: a daemon that keeps stdout open must not hold the slot. A
PID namespace ends all descendants with the call; without one, the call parent adopts and ends them.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NoReturn

from rstar2_megatron.judge.libraries import LIBRARIES
from rstar2_megatron.judge.limits import DISK_MB, MEGABYTE, OUTPUT_LIMIT_MB, CallLimits
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.judge.sandbox import isolation, linux
from rstar2_megatron.judge.sandbox.call_parent import CallEnd, CallParent
from rstar2_megatron.judge.sandbox.cgroup import CpuShare, SlotGroup
from rstar2_megatron.judge.sandbox.isolation import IsolationLayers
from rstar2_megatron.judge.sandbox.output import Output, shorten
from rstar2_megatron.judge.sandbox.process_tree import Supervision, family, resident_bytes
from rstar2_megatron.judge.sandbox.sandbox import Program
from rstar2_megatron.judge.sandbox.snippet import receive_exactly

LENGTH = struct.Struct("<I")
DEMOTED = bytes(4)  # an empty message to the worker during a call: the call is demoted, its answer follows
_LIBRARIES = re.compile(rf"\b({'|'.join(LIBRARIES.values())})\b")

# The public clients' template carries the program as a literal in base64.
_ENCODED = re.compile(r"""\bb64decode\(b?(["'])([A-Za-z0-9+/]{8,1000000}={0,2})\1""")


def uses_libraries(job: dict[str, Any]) -> bool:
    """A guess that affects only the cost: the program itself imports what the guess has missed."""
    if job["type"] != "python":
        return False
    source = job["solution"]
    return any(_LIBRARIES.search(text) for text in (source, *map(_decoded, _ENCODED.findall(source))))


def _decoded(literal: tuple[str, str]) -> str:
    try:
        return binascii.a2b_base64(literal[1]).decode("latin-1")
    except binascii.Error:
        return ""


class Runner:
    """Runs the jobs of one slot one after another: watches and ends their processes."""

    resident_at_start: int  # bytes of memory that each process of a call inherits
    directory = isolation.CALL_DIRECTORY  # working directory
    # Of the running call:
    limits: CallLimits
    supervision: Supervision
    out: Output
    err: Output
    shortage_before: tuple[int, int]  # of the group

    def __init__(
        self, layers: IsolationLayers, slot: int, group: SlotGroup | None, scratch: str, worker: socket.socket
    ) -> None:
        """`scratch` holds working directories where there is no private tmpfs. `worker` becomes readable when the running
        call is cancelled, and is sent DEMOTED when the call is demoted (see Supervision)."""
        self.layers = layers
        self.slot = slot
        self.group = group
        self.scratch = scratch
        self.worker = worker
        if group is not None:
            group.set_share(CpuShare.NO_CALL)  # its slot may have died in the middle of a call

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run `job` (type, solution, input, expected_output, files, limits) and return a SubmissionResult."""
        raise NotImplementedError

    def close(self) -> None:
        """End processes that live on between calls."""

    def _prepare_group(self) -> None:
        if self.group is not None:
            self.group.set_share(CpuShare.NEW)
            self.group.set_limit((self.limits.memory_mb + DISK_MB + 32) * MEGABYTE)
            self.shortage_before = self.group.shortage()

    def _killed_for_memory(self) -> Outcome | None:
        """The outcome of a call that the kernel killed for lack of memory: QUEUE_TIMEOUT when others had used it up."""
        if self.group is None:
            return None
        kills, reached = (now - before for now, before in zip(self.group.shortage(), self.shortage_before))
        return None if not kills else Outcome.MEMORY if reached else Outcome.QUEUE_TIMEOUT

    def _make_directory(self) -> None:
        if "private_tmpfs" in self.layers.active:
            return
        import tempfile  # here: with full isolation no call needs what it imports

        self.directory = tempfile.mkdtemp(prefix="call-", dir=self.scratch)
        if self.layers.uid_base is not None:
            os.chown(self.directory, self.layers.uid_base + self.slot, -1)

    def _remove_directory(self) -> None:
        if self.directory != isolation.CALL_DIRECTORY:
            import shutil  # here, as tempfile above

            shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, job: dict[str, Any], cpu_seconds: int, start: Callable[[Program, tuple[int, ...]], Any]) -> None:
        """Begin the job's program by `start`, with a new standard input and new pipes.

        The kernel ends it after `cpu_seconds` (-1: never), should the watch on its wall time fail.
        """
        has_input = bool(job.get("input"))
        if has_input:
            stdin = linux.memory_file(job["input"].encode("utf-8", "surrogatepass"))
        else:  # opened anew: a program may lock it, or change its flags
            stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        out_reader, out_writer = os.pipe()
        err_reader, err_writer = os.pipe()
        descriptors = (stdin, out_writer, err_writer)
        if self.layers.uid_base is not None:  # or the program could not open /dev/stdout
            for fd in descriptors[1:]:
                os.fchown(fd, self.layers.uid_base + self.slot, -1)
        memory_bytes = self.limits.memory_mb * MEGABYTE
        program = Program(
            job["type"],
            job["solution"],
            job.get("files"),
            has_input,
            self.directory,
            cpu_seconds,
            memory_bytes,
            job.get("shows", True),
        )
        try:
            start(program, descriptors)
        finally:
            for fd in descriptors:
                os.close(fd)
        kept = OUTPUT_LIMIT_MB * MEGABYTE
        self.out, self.err = Output(out_reader, kept), Output(err_reader, kept)

    def _watch(self, ends: tuple[int, ...]) -> Outcome | None:
        """Wait until one of the descriptors `ends` becomes readable (None), or there is a reason to end the call."""
        supervision = self.supervision
        cancellation = self.worker.fileno()
        poller = select.poll()
        streams = {stream.fd: stream for stream in (self.out, self.err)}
        for fd in (*ends, cancellation):
            poller.register(fd, select.POLLIN)
        reads_streams = False  # from the first look on: most calls end before it, and pipes hold 64 KB
        while True:
            now = time.monotonic()
            if now >= supervision.deadline and (verdict := supervision.verdict(now)):
                return verdict
            if now >= supervision.next_look:
                supervision.look(now)
                most = self.limits.memory_mb * MEGABYTE * 1.5
                if self.group is None and memory_used(supervision.find_pid(), self.resident_at_start) > most:
                    return Outcome.MEMORY
                if not reads_streams:
                    reads_streams = True
                    for fd in streams:
                        poller.register(fd, select.POLLIN)
            wait_s = max(0.0, min(supervision.deadline, supervision.next_look) - now)
            for fd, _ in poller.poll(wait_s * 1000 + 1):
                if fd in ends:
                    return None
                if fd == cancellation:
                    return Outcome.KILLED
                if not streams[fd].read():
                    poller.unregister(fd)
                elif streams[fd].is_too_much:
                    return Outcome.OUTPUT_LIMIT

    def _tell_demotion(self) -> None:
        """Tell the worker that this call sleeps or runs long: another call may begin beside it."""
        with contextlib.suppress(OSError):
            self.worker.sendall(DEMOTED)

    def _result(
        self, job: dict[str, Any], verdict: Outcome | None, end: CallEnd, cost: float, session: str | None = None
    ) -> dict[str, Any]:
        """A SubmissionResult. `verdict` is the reason why the call was ended, `cost` its wall time in seconds."""
        stdout, stderr = self.out.text(), self.err.text()
        ended_by = -end.code if end.code < 0 else None
        if end.failure:
            verdict = Outcome.INVALID_INPUT if end.failure.startswith("files: ") else Outcome.INTERNAL_ERROR
            stderr = end.failure
        elif verdict is Outcome.QUEUE_TIMEOUT:
            stderr += self.supervision.starved(cost)
        elif verdict is None and (killed := self._killed_for_memory()):
            verdict = killed
            if killed is Outcome.QUEUE_TIMEOUT:
                stderr += "This node's calls together used up the judge's memory: lower --workers or --memory-mb.\n"
        elif verdict is None:
            if end.code == 0:
                verdict = Outcome.OK
            elif ended_by == signal.SIGXCPU:
                verdict = Outcome.TIMEOUT
            elif ended_by is not None:
                verdict = Outcome.KILLED
            elif "MemoryError" in stderr[stderr.rstrip().rfind("\n") + 1 :]:
                verdict = Outcome.MEMORY
            else:
                verdict = Outcome.ERROR
        if session and verdict is Outcome.QUEUE_TIMEOUT:  # clients would send a cell again that has partly run
            verdict = Outcome.INTERNAL_ERROR
        if session == "lost":
            stderr += "\nThe interpreter has ended: names of earlier calls are gone.\n"
        expected = job.get("expected_output")
        shown_out, cut_out = shorten(stdout, self.limits.output_chars)
        shown_err, cut_err = shorten(stderr, self.limits.output_chars)
        return make_result(
            job.get("sub_id"),
            verdict,
            cost=cost,
            stdout=shown_out,
            stderr=shown_err,
            exit_code=end.code if ended_by is None else 128 + ended_by,
            signal=ended_by,
            truncated=cut_out or cut_err,
            peak_memory_bytes=end.peak_memory_bytes,
            queue_seconds=job.get("queue_seconds"),
            worker=job.get("worker"),
            session=session,
            success=verdict is Outcome.OK and (expected is None or stdout.strip() == expected.strip()),
        )


def memory_used(pid: int, resident_at_start: int) -> int:
    """Resident bytes of a call's processes beyond what each inherited."""
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError, ValueError):
            total += max(0, resident_bytes(member) - resident_at_start)
    return total


class CallRunner(Runner):
    """Runs each call in a process of its own, forked from one of two call parents.

    `small` has the standard library imported, `library` also numpy and sympy: a call that does not use them costs 1 ms less
    from the small one.
    """

    def __init__(self, *slot: Any, small: CallParent, library: CallParent) -> None:
        super().__init__(*slot)
        self.small = small
        self.library = library

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        limits = self.limits = CallLimits.from_dict(job["limits"])
        self._prepare_group()
        self._make_directory()
        try:
            started = time.monotonic()
            parent = self.library if uses_libraries(job) else self.small
            self._start(job, int(limits.time_limit_s) + 2, parent.start)
            self.resident_at_start = parent.resident_at_start
            limit_s = limits.usual_s(job["type"])
            self.supervision = Supervision(lambda: parent.pid, started, limit_s, self.group, self._tell_demotion)
            # The call must not outlive this function, whatever is raised.
            verdict: Outcome | None = Outcome.INTERNAL_ERROR
            try:
                verdict = self._watch((parent.fileno(),))
            finally:
                if verdict is not None:
                    self.supervision.promote(CpuShare.NEW)  # what the program writes at a limit has little time
                    parent.end_call()
                end = parent.take_end()
                if verdict is not None:
                    end = end._replace(code=-signal.SIGKILL)  # whichever signal it was
            cost = time.monotonic() - started
        finally:
            self._remove_directory()
        if self.group is not None:
            self.group.set_share(CpuShare.NO_CALL)
        self.out.close()
        self.err.close()
        return self._result(job, verdict, end, cost)


def send_message(sock: socket.socket, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive_message(sock: socket.socket) -> dict[str, Any]:
    """The next message; {} for an empty one, which cancels the running call."""
    (size,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size))
    return json.loads(receive_exactly(sock, size)) if size else {}


def serve_slot(sock: socket.socket, runner: Runner) -> NoReturn:
    """Run jobs until the worker closes the socket or a call parent dies."""
    try:
        while True:
            job = receive_message(sock)
            if not job:  # a cancellation that came after the end of its call
                continue
            try:
                result = runner.run(job)
            except (EOFError, ConnectionError):  # the call parent has died: the zygote replaces this slot
                raise
            except Exception as error:  # a fault of the sandbox, not of the program
                told = {name: job.get(name) for name in ("sub_id", "queue_seconds", "worker")}
                result = make_result(outcome=Outcome.INTERNAL_ERROR, stderr=f"{type(error).__name__}: {error}", **told)
            send_message(sock, result)
    except (EOFError, OSError):
        runner.close()
        os._exit(0)
