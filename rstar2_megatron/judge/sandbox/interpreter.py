"""A session's live interpreter: one isolated process that runs cell after cell. Runs in a slot process.

Between two cells all processes of the session are stopped (by the freezer of its control group, else by SIGSTOP), so that
an idle session uses no CPU. A cell that passes its time limit is interrupted as by Ctrl-C, and the session keeps its names.
An interpreter that cannot be interrupted ends, and the session with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.outcome import Outcome
from rstar2_megatron.judge.sandbox import linux
from rstar2_megatron.judge.sandbox.call import Runner
from rstar2_megatron.judge.sandbox.output import SHORTAGES, Output, outcome_of_failure, report
from rstar2_megatron.judge.sandbox.process_tree import Supervision, end_group, family, leave_priority, resident_bytes, usage_of
from rstar2_megatron.judge.sandbox.sandbox import Descriptors, Program, Sandbox
from rstar2_megatron.judge.sandbox.snippet import CELL_DONE, CELL_HEADER

_INTERRUPT_S = 1.0  # how long an interrupted cell may take to come back
_SEND_S = 5.0  # an interpreter that does not read its cell for so long hangs


class SessionRunner(Runner):
    """Runs the cells of one session. The interpreter starts with the first cell; the session ends with it."""

    pid = 0
    end = -1  # a descriptor that becomes readable when the process ends
    channel: socket.socket
    out: Output
    err: Output
    directory = ""

    def __init__(self, *slot: Any) -> None:
        super().__init__(*slot)
        self.sandbox = Sandbox(self.layers, self.slot, live=True)
        self.resident_at_start = resident_bytes(os.getpid())

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        limits = CallLimits.from_dict(job["limits"])
        started = time.monotonic()
        state = "kept"
        if not self.pid:
            state = "new"
            self._open(job, limits)
        before = self._prepare_group(limits)
        for stream in (self.out, self.err):
            stream.drain()
            stream.clear()  # output after the end of the last cell belongs to no call
        supervision = Supervision(
            lambda: self.pid, started, limits.time_limit_s, self.group, self._tell_demotion, usage_of(self.pid).cpu_s
        )
        self._continue()
        code = 0
        verdict = self._send(job)
        if verdict is None:
            ends = (self.end, self.channel.fileno())
            verdict = self._watch(ends, self.out, self.err, limits, supervision, self.resident_at_start)
        supervision.promote()
        done = self._collect(0.0 if verdict is None else self._interrupt())
        self._stop()
        cost = time.monotonic() - started
        for stream in (self.out, self.err):
            stream.drain()
        stderr = self.err.text()
        if verdict is Outcome.QUEUE_TIMEOUT:  # clients would send a cell again that has partly run
            verdict, stderr = Outcome.INTERNAL_ERROR, stderr + supervision.starved(cost)
        peak_memory_bytes = _peak_memory_bytes(self.pid)
        killed = self._killed_for_memory(before)
        if done is None or killed:
            state = "lost"
            code = self._finish()
            if verdict is None and killed:
                verdict = Outcome.MEMORY if killed is Outcome.MEMORY else Outcome.INTERNAL_ERROR
                stderr += SHORTAGES[killed]
            elif failure := self.sandbox.failure.take():
                verdict, stderr = outcome_of_failure(failure), failure
            elif verdict is None and code == 0:  # os._exit(0), or bytes on the channel that the program wrote
                code = 1
            stderr += "\nThe interpreter has ended: names of earlier calls are gone.\n"
        else:
            code = done
        return report(
            job,
            limits,
            code,
            verdict,
            cost=cost,
            stdout=self.out.text(),
            stderr=stderr,
            peak_memory_bytes=peak_memory_bytes,
            session=state,
        )

    def _open(self, job: dict[str, Any], limits: CallLimits) -> None:
        self.directory = self._make_directory()
        self.channel, theirs = socket.socketpair()

        def start(program: Program, descriptors: Descriptors) -> None:
            descriptors = descriptors._replace(channel=theirs.fileno())

            def begin() -> NoReturn:
                if self.group is not None:
                    self.group.join()
                leave_priority()
                self.sandbox.become(program, descriptors)

            self.pid = self.sandbox.fork(begin)

        self.out, self.err = self._start(job, limits, self.directory, start)
        theirs.close()
        self.end = os.pidfd_open(self.pid)
        self.channel.settimeout(_SEND_S)

    def _cpu_seconds(self, limits: CallLimits) -> int:
        return -1  # it serves many calls

    def _send(self, job: dict[str, Any]) -> Outcome | None:
        """Send the cell. Returns KILLED when the interpreter does not read it."""
        texts = (job["solution"], json.dumps(job.get("files") or {}))
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        stdin = linux.memory_file((job.get("input") or "").encode("utf-8", "surrogatepass"))
        try:
            socket.send_fds(self.channel, [CELL_HEADER.pack(*map(len, parts))], [stdin])
            self.channel.sendall(b"".join(parts))
        except OSError:
            has_ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return None if has_ended else Outcome.KILLED
        finally:
            os.close(stdin)
        return None

    def _interrupt(self) -> float:
        """Interrupt the cell as Ctrl-C does. Returns the seconds to wait for its end."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGINT)
        return _INTERRUPT_S

    def _collect(self, wait_s: float) -> int | None:
        """The exit code that the interpreter sent, or None when it sent none and must be ended."""
        if wait_s:
            deadline = time.monotonic() + wait_s
            poller = select.poll()
            for fd in (self.channel.fileno(), self.out.fd, self.err.fd):
                poller.register(fd, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0:
                ready = [fd for fd, _ in poller.poll(left * 1000 + 1)]
                if self.channel.fileno() in ready:
                    break
                for stream in (self.out, self.err):  # a full pipe would block the cell
                    if stream.fd in ready and not stream.read():
                        poller.unregister(stream.fd)
        self.channel.setblocking(False)
        try:
            told = self.channel.recv(CELL_DONE.size + 1)
        except OSError:
            return None
        finally:
            self.channel.settimeout(_SEND_S)
        # The program can write to the channel too: anything but one exit code ends its session.
        return CELL_DONE.unpack(told)[0] & 0xFF if len(told) == CELL_DONE.size else None

    def _stop(self) -> None:
        if self.group is not None and self.group.has_freezer:
            self.group.pause()
        elif self._signal_all(signal.SIGSTOP) > 1 and self.group is not None:
            self.group.pause()  # its processes might send SIGCONT to each other for ever

    def _continue(self) -> None:
        if self.group is not None:
            self.group.pause(False)
        if self.group is None or not self.group.has_freezer:
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> int:
        """Signal every process of the session, parents first; SIGSTOP twice, for processes forked meanwhile.

        Returns the number of processes.
        """
        for _ in range(2 if number == signal.SIGSTOP else 1):
            members = list(family(self.pid))
            for pid in members:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        return len(members)

    def _finish(self, wait_s: float = 0.1) -> int:
        """End the session's processes. Returns the interpreter's exit code, negative for a signal.

        An interpreter that is ending closes its descriptors before it is gone: `wait_s` lets it finish.
        """
        poller = select.poll()
        poller.register(self.end, select.POLLIN)
        ended_itself = bool(poller.poll(wait_s * 1000))
        if self.group is not None:
            self.group.pause(False)
        end_group(self.pid)
        _, status = os.waitpid(self.pid, 0)
        if not self.sandbox.namespaced:
            self.sandbox.end_orphans()
        for fd in (self.out.fd, self.err.fd, self.end):
            os.close(fd)
        self.channel.close()
        self._remove_directory(self.directory)
        self.pid = 0
        return os.waitstatus_to_exitcode(status) if ended_itself else -signal.SIGKILL

    def close(self) -> None:
        if self.pid:
            self._finish(wait_s=0.0)


def _peak_memory_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
