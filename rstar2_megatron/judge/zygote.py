"""The process that calls are forked from: single-threaded, numpy and sympy imported, no secret in memory.

Started fresh by a worker with a clean environment:
launcher (makes namespaces and control groups, removes them at the end)
  -> zygote (PID 1 of its namespace: when it ends, everything ends)
    -> one slot process for each call that may run at once -> the calls
    -> one slot process for each open session -> its interpreter.
The worker speaks with each slot over a socket of its own, which it receives over the control socket. It asks
for a session's slot by sending its number; closing the slot's socket ends the session.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from rstar2_megatron.judge import cpp, isolation, linux
from rstar2_megatron.judge.call import CallRunner, Sandbox
from rstar2_megatron.judge.cgroup import GroupTree, SlotGroup
from rstar2_megatron.judge.interpreter import SessionRunner
from rstar2_megatron.judge.isolation import Walls
from rstar2_megatron.judge.outcome import Outcome, make_result
from rstar2_megatron.services.owned_directory import make_owned_directory
from rstar2_megatron.services.parent_death import die_with_parent

_SCRATCH = "rstar2-judge-"
_LENGTH = struct.Struct("<I")


def send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """`size` bytes, or EOFError when the other side is gone."""
    parts = []
    while size:
        data = sock.recv(min(size, 1 << 20))
        if not data:
            raise EOFError
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def receive_message(sock: socket.socket) -> dict[str, Any]:
    """The next message; an empty one is a cancellation."""
    (size,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    message: dict[str, Any] = json.loads(receive_exactly(sock, size)) if size else {}
    return message


def serve_slot(sock: socket.socket, runner: Sandbox) -> NoReturn:
    """Run jobs as they come, until the worker closes the socket."""
    try:
        while True:
            job = receive_message(sock)
            if not job:  # a cancellation: read already, or too late
                continue
            try:
                result = runner.run(job)
            except Exception as error:  # a fault of ours: told, never the snippet's
                result = make_result(
                    job.get("sub_id"),
                    Outcome.INTERNAL_ERROR,
                    stderr=f"{type(error).__name__}: {error}",
                    queue_seconds=job.get("queue_seconds"),
                    worker=job.get("worker"),
                )
            send_message(sock, result)
    except (EOFError, OSError):
        runner.close()
        os._exit(0)


class Zygote:
    """Forks slots, and forks them again when they die."""

    def __init__(
        self, control: socket.socket, walls: Walls, groups: list[SlotGroup | None], slots: int, scratch: str
    ) -> None:
        """The first `slots` of the groups are for calls, the rest for sessions."""
        self.scratch = scratch
        self.control = control
        self.walls = walls
        self.groups = groups
        self.num_slots = slots
        self.slots: dict[int, int] = {}  # process id -> slot
        self.wanted: set[int] = set()  # session slots to start when their last process has ended

    def serve(self) -> NoReturn:
        """Until the worker closes the control socket, or dies (the kernel then kills this process)."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for slot in range(self.num_slots):
            self.start_slot(slot)
        while True:
            ready, _, _ = select.select([self.control.fileno(), wake_reader], [], [])
            if self.control.fileno() in ready:
                self.open_session_slot()
            with contextlib.suppress(BlockingIOError):
                os.read(wake_reader, 4096)
            self.reap()

    def open_session_slot(self) -> None:
        """The worker asks for a session's slot, or has gone."""
        asked = self.control.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(asked) < _LENGTH.size:
            os._exit(0)
        (slot,) = _LENGTH.unpack(asked)
        if slot in self.slots.values():
            self.wanted.add(slot)
        else:
            self.start_slot(slot)

    def start_slot(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._become_slot(slot, ours, theirs)
        self.slots[pid] = slot
        ours.close()
        socket.send_fds(self.control, [json.dumps({"slot": slot}).encode().ljust(64)], [theirs.fileno()])
        theirs.close()

    def _become_slot(self, slot: int, ours: socket.socket, theirs: socket.socket) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)
        linux.adopt_orphans()
        theirs.close()
        self.control.close()
        group = self.groups[slot]
        if group is not None:
            group.join()
        runner = CallRunner if slot < self.num_slots else SessionRunner
        serve_slot(ours, runner(self.walls, slot, group, self.scratch, ours))

    def reap(self) -> None:
        """Collect the dead; start a slot anew when one died; end what a dead slot left behind."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = self.slots.pop(pid, None)
            if slot is not None:
                with open(f"/proc/self/task/{os.getpid()}/children") as children:
                    for orphan in map(int, children.read().split()):
                        if orphan not in self.slots:
                            os.kill(orphan, signal.SIGKILL)
                if slot < self.num_slots or slot in self.wanted:
                    self.wanted.discard(slot)
                    self.start_slot(slot)


def import_libraries() -> None:
    """What snippets use most, imported once, and what sympy imports at its first use (0.1 s a call if left)."""
    import collections
    import fractions
    import itertools
    import random
    import statistics

    import numpy
    import sympy

    del collections, fractions, itertools, random, statistics, numpy
    x = sympy.symbols("x")
    str(sympy.solve(x**2 - 5 * x + 3, x))
    str(sympy.integrate(x * sympy.sin(x), x))
    str(sympy.simplify(sympy.sqrt(8) + sympy.factor(x**3 - 1)))
    gc.collect()
    gc.freeze()
    linux.collapse_heap()


def _run_zygote(
    control: socket.socket, walls: Walls, groups: list[SlotGroup | None], slots: int, scratch: str
) -> NoReturn:
    die_with_parent(signal.SIGKILL)
    isolation.build_private_root(walls)
    isolation.choose_remaining_layers(walls)
    import_libraries()
    send_message(
        control,
        {
            "isolation": walls.report(),
            "cpp": cpp.compiler() is not None,
        },
    )
    Zygote(control, walls, groups, slots, scratch).serve()


def launch(control_fd: int, slots: int, sessions: int) -> int:
    """The launcher. Returns the zygote's exit code when it has ended and its control groups are removed."""
    die_with_parent(signal.SIGTERM)
    os.environ.clear()
    os.environ.update(isolation.ENVIRONMENT)
    kept = (sys.prefix, sys.base_prefix)
    sys.path[:] = [isolation.CALL_DIRECTORY] + [  # the first takes the place of the project's directory
        p for p in sys.path if p.startswith(kept) or p.endswith(("site-packages", "dist-packages"))
    ]
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    walls = Walls()
    tree: GroupTree | None = None
    groups: list[SlotGroup | None] = [None] * (slots + sessions)
    try:
        tree = GroupTree(slots + sessions)
        groups = list(tree.slots)
        walls.raised("memory_cgroup")
    except OSError as error:
        walls.lacks("memory_cgroup", f"{error}: limits on address space and a watch on resident memory")
    scratch = str(make_owned_directory(_SCRATCH))
    os.chmod(scratch, 0o711)
    owner = os.getpid()
    isolation.enter_namespaces(walls)
    isolation.choose_uids(walls, slots + sessions, owner)
    if not walls.in_user_namespace and "own_uid" not in walls.active:
        walls.notes["uid"] = f"calls run as uid {os.geteuid()}"
    child = os.fork()
    if child == 0:
        try:
            _run_zygote(socket.socket(fileno=control_fd), walls, groups, slots, scratch)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(2, f"judge zygote: {error!r}\n".encode())
            os._exit(1)
    os.close(control_fd)

    def stop(*_: object) -> None:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    _, status = os.waitpid(child, 0)
    if tree is not None:
        tree.remove()
    shutil.rmtree(scratch, ignore_errors=True)
    return abs(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    raise SystemExit(launch(*map(int, sys.argv[1:4])))
