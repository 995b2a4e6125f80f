"""A session's live interpreter: one isolated process that runs cell after cell. Runs in a slot process.

Between two cells all processes of the session are stopped, by the freezer of its control group, else by SIGSTOP: see
docs/judge.md ("Sessions").
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
from rstar2_megatron.judge.sandbox.call_parent import CallEnd
from rstar2_megatron.judge.sandbox.cgroup import CpuShare
from rstar2_megatron.judge.sandbox.process_tree import Supervision, end_group, family, leave_priority, resident_bytes, usage_of
from rstar2_megatron.judge.sandbox.sandbox import Program, Sandbox
from rstar2_megatron.judge.sandbox.snippet import CELL_DONE, CELL_HEADER

_INTERRUPT_S = 3.0  # how long an interrupted cell may take to come back, on a machine whose cores others use too
_SEND_S = 5.0  # an interpreter that does not read its cell for so long hangs


class SessionRunner(Runner):
    """Runs the cells of one session. The interpreter starts with the first cell; the session ends with it."""

    pid = 0
    end = -1  # a descriptor that becomes readable when the process ends
    channel: socket.socket

    def __init__(self, *slot: Any) -> None:
        super().__init__(*slot)
        self.sandbox = Sandbox(self.layers, self.slot, live=True)
        self.resident_at_start = resident_bytes(os.getpid())

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        self.limits = CallLimits.from_dict(job["limits"])
        started = time.monotonic()
        session = "kept" if self.pid else "new"
        if not self.pid:
            self._open(job)
        self._prepare_group()
        for stream in (self.out, self.err):
            stream.drain()
            stream.clear()  # output after the end of the last cell belongs to no call
        limit_s, cpu_before_s = self.limits.time_limit_s, usage_of(self.pid).cpu_s
        self.supervision = Supervision(lambda: self.pid, started, limit_s, self.group, self._tell_demotion, cpu_before_s)
        self._continue()
        verdict = self._send(job)
        if verdict is None:
            verdict = self._watch((self.end, self.channel.fileno()))
        if verdict is not None:
            self.supervision.promote(CpuShare.NEW)  # with what others leave it might not come back in time
            self._interrupt()
        code = self._collect()
        self.supervision.promote(CpuShare.NO_CALL)
        self._stop()
        cost = time.monotonic() - started
        for stream in (self.out, self.err):
            stream.drain()
        peak_memory_bytes, failure = _peak_memory_bytes(self.pid), ""
        if code is None or self._killed_for_memory():
            session = "lost"
            code = self._finish() or 1  # 0: after os._exit(0), or bytes on the channel that the program wrote
            failure = self.sandbox.failure()
        return self._result(job, verdict, CallEnd(code, peak_memory_bytes, failure), cost, session)

    def _open(self, job: dict[str, Any]) -> None:
        self._make_directory()
        self.channel, theirs = socket.socketpair()

        def start(program: Program, descriptors: tuple[int, ...]) -> None:
            def begin() -> NoReturn:
                if self.group is not None:
                    self.group.join()
                leave_priority()
                self.sandbox.become(program, (*descriptors, theirs.fileno()))

            self.pid = self.sandbox.fork(begin)

        self._start(job, -1, start)  # no limit of CPU time: it serves many calls
        theirs.close()
        self.end = os.pidfd_open(self.pid)
        self.channel.settimeout(_SEND_S)

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

    def _interrupt(self) -> None:
        """Interrupt the cell as Ctrl-C does, and wait for its end."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGINT)
        deadline = time.monotonic() + _INTERRUPT_S
        poller = select.poll()
        for fd in (self.channel.fileno(), self.out.fd, self.err.fd):
            poller.register(fd, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = [fd for fd, _ in poller.poll(left * 1000 + 1)]
            if self.channel.fileno() in ready:
                return
            for stream in (self.out, self.err):  # a full pipe would block the cell
                if stream.fd in ready and not stream.read():
                    poller.unregister(stream.fd)

    def _collect(self) -> int | None:
        """The exit code that the interpreter sent, or None when it sent none and must be ended."""
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
        self.sandbox.end_orphans()
        for fd in (self.out.fd, self.err.fd, self.end):
            os.close(fd)
        self.channel.close()
        self._remove_directory()
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
