"""The processes that calls are forked from: single-threaded, no secret in memory.

Started fresh by a worker with a clean environment:
launcher (makes namespaces and control groups, removes them at the end)
  -> zygote (PID 1 of its namespace: when it ends, everything ends)
    -> one slot process for each call that may run at once
      -> its call parent -> calls that need the standard library only
    -> library zygote (numpy and sympy imported)
      -> a second call parent for each slot -> calls that use such libraries
      -> one slot process for each open session -> its interpreter.
Each call copies and ends what its parent has mapped, so the small zygote imports as little as it can: every shared
library is five mappings (tests/judge/sandbox/test_environment.py). The worker speaks with each slot over a socket of its own,
which it receives over the control socket. It asks for a session's slot by sending its number; closing the slot's
socket ends the session.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from rstar2_megatron.judge.limits import default_permits
from rstar2_megatron.judge.sandbox import cpp, isolation, linux
from rstar2_megatron.judge.sandbox.call import CallRunner
from rstar2_megatron.judge.sandbox.call_parent import CallParent, Connection, make_connection, serve_calls
from rstar2_megatron.judge.sandbox.cgroup import GroupTree, SlotGroup
from rstar2_megatron.judge.sandbox.interpreter import SessionRunner
from rstar2_megatron.judge.sandbox.isolation import IsolationLayers
from rstar2_megatron.judge.sandbox.process_tree import children, weigh_as
from rstar2_megatron.judge.sandbox.slot_process import LENGTH, send_message, serve_slot
from rstar2_megatron.services.parent_death import die_with_parent

_SCRATCH = "rstar2-judge-"
_SOON_S = 0.2  # a slot that ends within this time probably cannot start


class Forker:
    """Forks slot processes and collects the dead."""

    def __init__(
        self, layers: IsolationLayers, groups: list[SlotGroup | None], num_slots: int, scratch: str
    ) -> None:
        """The first `num_slots` of the groups are for calls, the rest for sessions."""
        self.layers = layers
        self.groups = groups
        self.num_slots = num_slots
        self.scratch = scratch
        self.slots: dict[int, int] = {}  # process id -> slot
        self.others: set[int] = set()  # further children

    def fork_for(self, slot: int, serve: Callable[[SlotGroup | None], NoReturn], kept: set[int]) -> None:
        """Start a process that serves a slot, with no other descriptors than `kept` and its control group's."""
        pid = os.fork()
        if pid:
            self.slots[pid] = slot
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)
        group = self.groups[slot]
        # The other slots' control groups are no business of this one, and each call would copy and close
        # their descriptors: three for each slot and session, with thousands of them most of a call's cost.
        linux.close_all_but(kept if group is None else kept | group.descriptors)
        if group is not None:
            group.join()
        serve(group)

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
        """Collect the dead; end what they left behind."""
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
            # A slot leaves its call parent, and that one its call: each is found when the one above it is collected.
            for orphan in set(children(os.getpid())) - self.slots.keys() - self.others:
                os.kill(orphan, signal.SIGKILL)
            if slot is not None:
                self.on_end(slot)

    def on_end(self, slot: int) -> None:
        """A slot's process has ended."""


class LibraryZygote(Forker):
    """Has the libraries imported; forks call parents and session slots as the zygote asks.

    It asks by a slot's number and the descriptors to serve: a line's two ends, or a session slot's socket.
    """

    def serve(self, control: socket.socket) -> NoReturn:
        self.control = control
        self.waiting: dict[int, list[int]] = {}  # for slots whose last process has not ended yet
        linux.adopt_orphans()
        import_libraries()
        control.send(b"ready")
        self.loop(control, self.start_slot)

    def start_slot(self) -> None:
        message, fds, _, _ = socket.recv_fds(self.control, LENGTH.size, 2)
        if not message:
            os._exit(0)
        (slot,) = LENGTH.unpack(message)
        self.waiting[slot] = fds
        last = [pid for pid, served in self.slots.items() if served == slot]
        if not last:
            self.on_end(slot)
        elif slot < self.num_slots:  # its slot is gone, and nobody watches its call any more
            os.kill(last[0], signal.SIGKILL)

    def on_end(self, slot: int) -> None:
        fds = self.waiting.pop(slot, None)
        if fds is None:
            return
        if slot < self.num_slots:
            connection = Connection(socket.socket(fileno=fds[0]), fds[1])
            self.fork_for(slot, lambda _: serve_calls(connection, self.layers, slot), set(fds))
            connection.close()
        else:
            sock = socket.socket(fileno=fds[0])
            self.fork_for(slot, lambda group: self._serve_session(sock, slot, group), set(fds))
            sock.close()

    def _serve_session(self, sock: socket.socket, slot: int, group: SlotGroup | None) -> NoReturn:
        linux.adopt_orphans()
        serve_slot(sock, SessionRunner(self.layers, slot, group, self.scratch, sock))


class Zygote(Forker):
    """Forks slots, and forks them again when they die."""

    def serve(self, control: socket.socket) -> NoReturn:
        """Until the worker closes the control socket, or dies (the kernel then kills this process)."""
        self.control = control
        self.started: dict[int, float] = {}  # when the process of a slot was started last
        self.library, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
            control.close()
            self.library.close()
            LibraryZygote(self.layers, self.groups, self.num_slots, self.scratch).serve(theirs)
        self.others.add(pid)
        theirs.close()
        settle()
        if not self.library.recv(16):
            raise RuntimeError("numpy and sympy could not be imported")
        told = {"isolation": self.layers.report(), "cpp": cpp.compiler() is not None}
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
        self._to_library(LENGTH.unpack(asked)[0], ours.fileno())
        ours.close()
        self._to_worker(LENGTH.unpack(asked)[0], theirs)

    def start_slot(self, slot: int) -> None:
        self.started[slot] = time.monotonic()
        ours, theirs = socket.socketpair()
        library, its_end = make_connection()
        kept = {ours.fileno(), library.messages.fileno(), library.pids}
        self.fork_for(slot, lambda group: self._serve(ours, slot, group, library), kept)
        self._to_library(slot, its_end.messages.fileno(), its_end.pids)
        its_end.close()
        self._to_worker(slot, theirs)
        ours.close()
        library.close()

    def _serve(
        self, sock: socket.socket, slot: int, group: SlotGroup | None, library: Connection
    ) -> NoReturn:
        """In the slot's process: start its call parent, and serve."""
        small, its_end = make_connection()
        if os.fork() == 0:
            die_with_parent(signal.SIGKILL)
            linux.close_all_but({its_end.messages.fileno(), its_end.pids})
            serve_calls(its_end, self.layers, slot)
        its_end.close()
        parents = {"small": CallParent(small), "library": CallParent(library)}
        serve_slot(sock, CallRunner(self.layers, slot, group, self.scratch, sock, **parents))

    def on_end(self, slot: int) -> None:
        if time.monotonic() - self.started[slot] < _SOON_S:  # one that cannot start shall not fill the log
            time.sleep(_SOON_S)
        self.start_slot(slot)

    def _to_library(self, slot: int, *descriptors: int) -> None:
        socket.send_fds(self.library, [LENGTH.pack(slot)], descriptors)

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
    builtins.exit, builtins.quit = (_sitebuiltins.Quitter(name, "Ctrl-D") for name in ("exit", "quit"))
    builtins.help = _sitebuiltins._Helper()


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
    control: socket.socket, layers: IsolationLayers, groups: list[SlotGroup | None], slots: int, scratch: str
) -> NoReturn:
    die_with_parent(signal.SIGKILL)
    isolation.build_private_root(layers)
    isolation.choose_remaining_layers(layers)
    isolation.raise_inherited_layers(layers)
    import_standard_library()
    Zygote(layers, groups, slots, scratch).serve(control)


def launch(control_fd: int, slots: int, sessions: int) -> int:
    """The launcher. Returns the zygote's exit code when it has ended and its control groups are removed."""
    die_with_parent(signal.SIGTERM)
    weigh_as(default_permits())  # all calls are of this one session
    os.environ.clear()
    os.environ.update(isolation.ENVIRONMENT)
    kept = (sys.prefix, sys.base_prefix)
    sys.path[:] = [isolation.CALL_DIRECTORY] + [  # the first takes the place of the project's directory
        p for p in sys.path if p.startswith(kept) or p.endswith(("site-packages", "dist-packages"))
    ]
    linux.raise_open_files()
    layers = IsolationLayers()
    tree: GroupTree | None = None
    groups: list[SlotGroup | None] = [None] * (slots + sessions)
    try:
        tree = GroupTree(slots + sessions)
        groups = list(tree.slots)
        layers.raised("memory_cgroup")
    except OSError as error:
        layers.lacks("memory_cgroup", f"{error}: limits on address space and a watch on resident memory")
    owner = os.getpid()
    isolation.enter_namespaces(layers)
    isolation.choose_uids(layers, slots + sessions, owner)
    if not layers.in_user_namespace and "own_uid" not in layers.active:
        layers.notes["uid"] = f"calls run as uid {os.geteuid()}"
    scratch_reader, scratch_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(scratch_writer)
        try:
            scratch = os.read(scratch_reader, 4096).decode()
            os.close(scratch_reader)
            _run_zygote(socket.socket(fileno=control_fd), layers, groups, slots, scratch)
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
    sys.prefix = sys.exec_prefix = sys.argv[4]
    sys.path[:] = sys.argv[5:]
    raise SystemExit(launch(*map(int, sys.argv[1:4])))
