"""The processes that calls are forked from: single-threaded, no secret in memory.

Started fresh by a worker with a clean environment:
launcher (makes namespaces and control groups, removes them at the end)
  -> zygote (PID 1 of its namespace: when it ends, everything ends)
    -> one slot process for each call that may run at once -> calls that need the standard library only
    -> library zygote (numpy and sympy imported)
      -> one twin for each slot -> calls that use such libraries
      -> one slot process for each open session -> its interpreter.
Each call copies and ends what its parent has mapped, so the small zygote imports as little as it can: every shared
library is five mappings (tests/judge/test_environment.py). The worker speaks with each slot over a socket of its own,
which it receives over the control socket. It asks for a session's slot by sending its number; closing the slot's
socket ends the session.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from rstar2_megatron.judge import cpp, isolation, linux
from rstar2_megatron.judge.call import CallRunner, Sandbox
from rstar2_megatron.judge.cgroup import GroupTree, SlotGroup
from rstar2_megatron.judge.interpreter import SessionRunner
from rstar2_megatron.judge.isolation import Walls
from rstar2_megatron.judge.limits import default_starts
from rstar2_megatron.judge.process_tree import children, weigh_as
from rstar2_megatron.judge.slot_process import LENGTH, send_message, serve_slot
from rstar2_megatron.services.parent_death import die_with_parent

_SCRATCH = "rstar2-judge-"


@dataclass
class Forker:
    """Forks slot processes and collects the dead."""

    walls: Walls
    groups: list[SlotGroup | None]
    num_slots: int  # the first of the groups are for calls, the rest for sessions
    scratch: str

    def __post_init__(self) -> None:
        self.slots: dict[int, int] = {}  # process id -> slot
        self.others: set[int] = set()  # further children

    def fork_slot(self, slot: int, sock: socket.socket, twin: socket.socket | None = None) -> None:
        """Start a process that serves `sock`."""
        pid = os.fork()
        if pid:
            self.slots[pid] = slot
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)
        linux.adopt_orphans()
        group = self.groups[slot]
        # The other slots' control groups are no business of this one, and each call would copy and close
        # their descriptors: three for each slot and session, with thousands of them most of a call's cost.
        kept = {sock.fileno()} if twin is None else {sock.fileno(), twin.fileno()}
        linux.close_all_but(kept if group is None else kept | group.descriptors)
        if group is not None:
            group.join()
        runner: type[Sandbox] = CallRunner if slot < self.num_slots else SessionRunner
        serve_slot(sock, runner(self.walls, slot, group, self.scratch, sock), twin)

    def loop(self, control: socket.socket, on_control: Callable[[], None]) -> NoReturn:
        """Serve `control`, and collect the dead, for ever."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        poller = select.poll()  # select() takes no descriptor above 1023, and control groups hold many
        for fd in (control.fileno(), wake_reader):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if control.fileno() in ready:
                on_control()
            with contextlib.suppress(BlockingIOError):
                os.read(wake_reader, 4096)
            self.reap()

    def reap(self) -> None:
        """Collect the dead; end what a dead slot left behind."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.others:
                os._exit(1)  # without it nothing works: the worker starts the sandbox anew
            slot = self.slots.pop(pid, None)
            if slot is not None:
                for orphan in set(children(os.getpid())) - self.slots.keys() - self.others:
                    os.kill(orphan, signal.SIGKILL)
                self.on_end(slot)

    def on_end(self, slot: int) -> None:
        """A slot's process has ended."""


class LibraryZygote(Forker):
    """Has the libraries imported; forks twins and session slots as the zygote asks (number and socket)."""

    def serve(self, control: socket.socket) -> NoReturn:
        self.control = control
        self.waiting: dict[int, socket.socket] = {}  # for slots whose last process has not ended yet
        linux.adopt_orphans()
        import_libraries()
        control.send(b"ready")
        self.loop(control, self.start_slot)

    def start_slot(self) -> None:
        message, fds, _, _ = socket.recv_fds(self.control, LENGTH.size, 1)
        if not message:
            os._exit(0)
        (slot,) = LENGTH.unpack(message)
        self.waiting[slot] = socket.socket(fileno=fds[0])
        if slot not in self.slots.values():
            self.on_end(slot)

    def on_end(self, slot: int) -> None:
        sock = self.waiting.pop(slot, None)
        if sock is not None:
            self.fork_slot(slot, sock)
            sock.close()


class Zygote(Forker):
    """Forks slots, and forks them again when they die."""

    def serve(self, control: socket.socket) -> NoReturn:
        """Until the worker closes the control socket, or dies (the kernel then kills this process)."""
        self.control = control
        self.library, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
            control.close()
            self.library.close()
            LibraryZygote(self.walls, self.groups, self.num_slots, self.scratch).serve(theirs)
        self.others.add(pid)
        theirs.close()
        settle()
        if not self.library.recv(16):
            raise RuntimeError("numpy and sympy could not be imported")
        told = {"isolation": self.walls.report(), "cpp": cpp.compiler() is not None}
        send_message(control, json.dumps(told).encode())
        for slot in range(self.num_slots):
            self.start_slot(slot)
        self.loop(control, self.open_session_slot)

    def open_session_slot(self) -> None:
        """The worker asks for a session's slot, or has gone."""
        asked = self.control.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(asked) < LENGTH.size:
            os._exit(0)
        ours, theirs = socket.socketpair()
        self._to_library(LENGTH.unpack(asked)[0], ours)
        self._to_worker(LENGTH.unpack(asked)[0], theirs)

    def start_slot(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        twin, twins_end = socket.socketpair()
        self.fork_slot(slot, ours, twin)
        self._to_library(slot, twins_end)
        self._to_worker(slot, theirs)
        ours.close()
        twin.close()

    def on_end(self, slot: int) -> None:
        self.start_slot(slot)

    def _to_library(self, slot: int, sock: socket.socket) -> None:
        socket.send_fds(self.library, [LENGTH.pack(slot)], [sock.fileno()])
        sock.close()

    def _to_worker(self, slot: int, sock: socket.socket) -> None:
        socket.send_fds(self.control, [json.dumps({"slot": slot}).encode().ljust(64)], [sock.fileno()])
        sock.close()


def settle() -> None:
    """Make forks cheap: what lives now will stay."""
    gc.collect()
    gc.freeze()
    linux.collapse_heap()
    with contextlib.suppress(OSError):  # no gain where the kernel does not let a process write its own code
        linux.copy_code_at_fork()


def import_standard_library() -> None:
    """What snippets use most. What few use and all would copy they import themselves: cmath, datetime (2 ms), statistics."""
    import collections
    import decimal
    import fractions
    import functools
    import itertools
    import math
    import random
    import string

    del collections, decimal, fractions, functools, itertools, math, random, string


def import_libraries() -> None:
    """numpy, sympy, and what sympy imports at its first use (0.1 s a call if left)."""
    import numpy
    import sympy

    del numpy
    x = sympy.symbols("x")
    str(sympy.solve(x**2 - 5 * x + 3, x))
    str(sympy.integrate(x * sympy.sin(x), x))
    str(sympy.simplify(sympy.sqrt(8) + sympy.factor(x**3 - 1)))
    settle()


def _run_zygote(
    control: socket.socket, walls: Walls, groups: list[SlotGroup | None], slots: int, scratch: str
) -> NoReturn:
    die_with_parent(signal.SIGKILL)
    isolation.build_private_root(walls)
    isolation.choose_remaining_layers(walls)
    isolation.raise_inherited_layers(walls)
    import_standard_library()
    Zygote(walls, groups, slots, scratch).serve(control)


def launch(control_fd: int, slots: int, sessions: int) -> int:
    """The launcher. Returns the zygote's exit code when it has ended and its control groups are removed."""
    die_with_parent(signal.SIGTERM)
    weigh_as(default_starts())  # all calls are of this one session
    os.environ.clear()
    os.environ.update(isolation.ENVIRONMENT)
    kept = (sys.prefix, sys.base_prefix)
    sys.path[:] = [isolation.CALL_DIRECTORY] + [  # the first takes the place of the project's directory
        p for p in sys.path if p.startswith(kept) or p.endswith(("site-packages", "dist-packages"))
    ]
    linux.raise_open_files()
    walls = Walls()
    tree: GroupTree | None = None
    groups: list[SlotGroup | None] = [None] * (slots + sessions)
    try:
        tree = GroupTree(slots + sessions)
        groups = list(tree.slots)
        walls.raised("memory_cgroup")
    except OSError as error:
        walls.lacks("memory_cgroup", f"{error}: limits on address space and a watch on resident memory")
    owner = os.getpid()
    isolation.enter_namespaces(walls)
    isolation.choose_uids(walls, slots + sessions, owner)
    if not walls.in_user_namespace and "own_uid" not in walls.active:
        walls.notes["uid"] = f"calls run as uid {os.geteuid()}"
    scratch_reader, scratch_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(scratch_writer)
        try:
            scratch = os.read(scratch_reader, 4096).decode()
            os.close(scratch_reader)
            _run_zygote(socket.socket(fileno=control_fd), walls, groups, slots, scratch)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                os.write(2, f"judge zygote: {error!r}\n".encode())
            os._exit(1)
    os.close(control_fd)
    os.close(scratch_reader)
    # From here on this process may import what no call should inherit.
    import shutil

    from rstar2_megatron.services.owned_directory import make_owned_directory

    scratch = str(make_owned_directory(_SCRATCH))
    os.chmod(scratch, 0o711)
    os.write(scratch_writer, scratch.encode())
    os.close(scratch_writer)

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
