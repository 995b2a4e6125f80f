"""The processes that fork calls: single-threaded, without secrets in memory.

A worker starts them with a clean environment:
launcher (makes namespaces and control groups, removes them at the end)
  -> zygote (PID 1 of its namespace: when it ends, everything ends)
    -> one slot process for each slot
      -> its call parent -> calls that need only the standard library
    -> library zygote (numpy and sympy imported)
      -> a second call parent for each slot -> calls that use these libraries
      -> one slot process for each open session -> its interpreter.
Each call copies and unmaps its parent's memory mappings, so the zygote imports as little as possible: every shared library
is five mappings (tests/judge/sandbox/test_environment.py). The worker has one socket to each slot, which it receives over
the control socket. It asks for a session's slot by sending the slot's number, and ends the session by closing the
socket.
"""

from __future__ import annotations

import _sitebuiltins
import _thread
import builtins
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from rstar2_megatron.judge.libraries import OnlyLibraries
from rstar2_megatron.judge.sandbox import cpp, guard, isolation, linux
from rstar2_megatron.judge.sandbox.call import LENGTH, CallRunner, send_message, serve_slot
from rstar2_megatron.judge.sandbox.call_parent import CallParent, Connection, make_connection, serve_calls
from rstar2_megatron.judge.sandbox.cgroup import GroupTree, SlotGroup
from rstar2_megatron.judge.sandbox.interpreter import SessionRunner
from rstar2_megatron.judge.sandbox.isolation import IsolationLayers
from rstar2_megatron.judge.sandbox.process_tree import children, leave_priority
from rstar2_megatron.services.parent_death import die_with_parent

_WITHOUT_CPU_GROUPS = "each process of a call weighs as one call, by its niceness"
_SOON_S = 0.2  # a slot that ends this soon after its start probably cannot start


class Forker:
    """Forks slot processes and reaps dead children."""

    def __init__(self, layers: IsolationLayers, groups: Sequence[SlotGroup | None], num_slots: int, scratch: str) -> None:
        """The first `num_slots` of `groups` are for calls, the others for sessions."""
        self.layers = layers
        self.groups = groups
        self.num_slots = num_slots
        self.scratch = scratch
        self.slots: dict[int, int] = {}  # process id -> slot
        self.library_pid = 0  # the zygote's further child

    def fork_for(self, slot: int, serve: Callable[..., NoReturn], *descriptors: int) -> None:
        """Start a process that calls `serve(slot, *descriptors)`.

        It keeps only `descriptors`, which are closed here, and those of its control group.
        """

        def work() -> NoReturn:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            group = self.groups[slot]
            # Each call would copy and close the descriptors of all control groups, three for each slot and session: with
            # thousands of them that would be most of a call's cost.
            linux.close_all_but({*descriptors, *self.layers.guard, *(group.descriptors if group else ())})
            serve(slot, *descriptors)

        self.slots[linux.start_process("zygote", work)] = slot
        for fd in descriptors:
            os.close(fd)

    def loop(self, control: socket.socket, on_control: Callable[[], None]) -> NoReturn:
        """Serve `control` and reap dead children, for ever."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        poller = select.poll()  # select() takes no descriptor above 1023
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
        """Reap dead children; kill their orphans."""
        while True:
            pid = 0
            with contextlib.suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == self.library_pid:
                os._exit(1)  # nothing works without it: the worker ends and is restarted
            slot = self.slots.pop(pid, None)
            # A dead slot leaves its call parent, a dead call parent its call: each is found when its parent is reaped.
            for orphan in set(children(os.getpid())) - {*self.slots, self.library_pid}:
                os.kill(orphan, signal.SIGKILL)
            if slot is not None:
                self.on_end(slot)

    def on_end(self, slot: int) -> None:
        """A slot's process has ended."""

    def _serve_calls(self, slot: int, *connection: int) -> NoReturn:
        """In a call parent: it and its calls are in the slot's group."""
        group = self.groups[slot]
        if group is not None:
            group.join()
        leave_priority()
        guard.stand_under(self.layers)
        linux.close_all_but(set(connection))
        serve_calls(Connection(*connection), self.layers, slot)


class LibraryZygote(Forker):
    """Has numpy and sympy imported; forks call parents and session slots on the zygote's request.

    A request is a slot's number with descriptors: the two of a Connection, or the socket of a session slot.
    """

    def serve(self, control: socket.socket) -> NoReturn:
        self.control = control
        self.waiting: dict[int, Sequence[int]] = {}  # for slots whose previous process has not ended yet
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
        elif slot < self.num_slots:  # its slot has died, so nobody watches its call
            os.kill(last[0], signal.SIGKILL)

    def on_end(self, slot: int) -> None:
        descriptors = self.waiting.pop(slot, ())
        if descriptors and slot < self.num_slots:
            self.fork_for(slot, self._serve_calls, *descriptors)
        elif descriptors:
            self.fork_for(slot, self._serve_session, *descriptors)

    def _serve_session(self, slot: int, worker: int) -> NoReturn:
        linux.adopt_orphans()
        guard.stand_under(self.layers)
        sock = socket.socket(fileno=worker)
        serve_slot(sock, SessionRunner(self.layers, slot, self.groups[slot], self.scratch, sock))


class Zygote(Forker):
    """Forks the slots, and replaces dead ones."""

    def serve(self, control: socket.socket) -> NoReturn:
        """Serve until the worker closes the control socket, or dies (the kernel then kills this process)."""
        self.control = control
        self.started: dict[int, float] = {}  # time of the last start of each slot
        self.library, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def serve_libraries() -> NoReturn:
            control.close()
            self.library.close()
            LibraryZygote(self.layers, self.groups, self.num_slots, self.scratch).serve(theirs)

        self.library_pid = linux.start_process("zygote", serve_libraries)
        theirs.close()
        make_forks_cheap()
        if not self.library.recv(16):
            raise RuntimeError("numpy and sympy could not be imported")
        send_message(control, {"isolation": self.layers.report(), "cpp": cpp.compiler() is not None})
        for slot in range(self.num_slots):
            self.start_slot(slot)
        self.loop(control, self.open_session_slot)

    def open_session_slot(self) -> None:
        """Handle the worker's request for a session's slot, or its end."""
        asked = self.control.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(asked) < LENGTH.size:
            os._exit(0)
        ours, theirs = socket.socketpair()
        self._hand_out(LENGTH.unpack(asked)[0], theirs, ours.detach())

    def start_slot(self, slot: int) -> None:
        self.started[slot] = time.monotonic()
        ours, theirs = socket.socketpair()
        library, its_end = make_connection()
        self.fork_for(slot, self._serve, ours.detach(), *library)
        self._hand_out(slot, theirs, *its_end)

    def _serve(self, slot: int, worker: int, *library: int) -> NoReturn:
        """In the slot's process: start its call parent, and serve."""
        small, its_end = make_connection()
        linux.start_process("zygote", lambda: self._serve_calls(slot, *its_end))
        for fd in its_end:
            os.close(fd)
        # Its last namespace's first process may outlive it, with its end of the connection.
        signal.signal(signal.SIGCHLD, lambda *_: os._exit(0))
        parents = {"small": CallParent(small), "library": CallParent(Connection(*library))}
        sock = socket.socket(fileno=worker)
        serve_slot(sock, CallRunner(self.layers, slot, self.groups[slot], self.scratch, sock, **parents))

    def on_end(self, slot: int) -> None:
        if time.monotonic() - self.started[slot] < _SOON_S:  # a slot that cannot start must not fill the log
            time.sleep(_SOON_S)
        self.start_slot(slot)

    def _hand_out(self, slot: int, worker: socket.socket, *library: int) -> None:
        """Give the worker its end of a slot, and the library zygote its descriptors."""
        for sock, fds in ((self.library, library), (self.control, (worker.fileno(),))):
            socket.send_fds(sock, [LENGTH.pack(slot)], fds)
        worker.close()
        for fd in library:
            os.close(fd)


def make_forks_cheap() -> None:
    """Keep the garbage collector from writing to what calls inherit; back the heap by huge pages."""
    gc.collect()
    gc.freeze()
    linux.collapse_heap()


def import_standard_library() -> None:
    """Import what programs, and the public clients' template (ast, base64), use most.

    All calls would copy rare modules, so programs import them: cmath, datetime (2 ms).
    """
    names = "ast base64 collections decimal fractions functools itertools math random string"
    for name in names.split():
        __import__(name)
    builtins.exit, builtins.quit = (_sitebuiltins.Quitter(name, "Ctrl-D") for name in ("exit", "quit"))
    builtins.help = _sitebuiltins._Helper()
    # The usual 8 MB count towards a call's address space: 60 threads used it up. Recursion to Python's limit takes up to 2 MB.
    _thread.stack_size(4 << 20)


def hide_other_packages() -> None:
    """Make the libraries the only packages that programs find."""
    for place in isolation.package_directories():
        if os.path.isdir(place):
            sys.path_importer_cache[place] = OnlyLibraries(sys.path_hooks[-1](place))  # type: ignore[assignment]


def import_libraries() -> None:
    """Import numpy, sympy, and what sympy imports at its first use, which takes 0.1 s."""
    import sympy

    __import__("numpy")
    x = sympy.symbols("x")
    str(sympy.solve(x**2 - 5 * x + 3, x))
    str(sympy.integrate(x * sympy.sin(x), x))
    str(sympy.simplify(sympy.sqrt(8) + sympy.factor(x**3 - 1)))
    make_forks_cheap()


def _make_groups(layers: IsolationLayers, count: int, most: int) -> GroupTree | None:
    """The control groups, as GroupTree; None where no memory groups can be made."""
    try:
        tree = GroupTree(count, most)
    except OSError as error:
        layers.record("memory_cgroup", f"{error}: limits on address space and a watch on resident memory")
        layers.record("cpu_cgroup", f"{error}: {_WITHOUT_CPU_GROUPS}")
        return None
    layers.record("memory_cgroup")
    layers.record("cpu_cgroup", tree.without_cpu and f"{tree.without_cpu}: {_WITHOUT_CPU_GROUPS}")
    has_freezer = all(group.has_freezer for group in tree.slots)
    layers.record("freezer", None if has_freezer else "no control groups of version 2, or Linux before 5.2")
    return tree


def launch(control_fd: int, slots: int, sessions: int, scratch: str) -> int:
    """Run the launcher until the zygote has ended, and remove the control groups and `scratch`. Returns the zygote's exit code.

    `scratch` holds the calls' directories where there is no private tmpfs.
    """
    die_with_parent(signal.SIGTERM)
    os.umask(0o022)  # calls of other user ids must be able to enter what is mounted for them
    # What who started the judge ignores (nohup: SIGHUP; RLinf's driver: SIGUSR1), a program would ignore too.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python's own
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(isolation.ENVIRONMENT)
    os.environ["PATH"] = f"{isolation.COMMANDS}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    packages = isolation.package_directories()
    os.environ["PYTHONPATH"] = ":".join([isolation.COMMANDS, *packages])  # children inherit -S, so do not look there themselves
    kept = [place for place in sys.path if place in packages or place.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [isolation.CALL_DIRECTORY, *kept]  # the first takes the place of the project's directory
    linux.raise_open_files()
    layers = IsolationLayers()
    tree = _make_groups(layers, slots + sessions, min(100, max(1, slots * 3 // 16)))
    isolation.enter_namespaces(layers)
    isolation.choose_uids(layers, slots + sessions)
    guard_pid = guard.start(layers)

    def serve() -> NoReturn:
        isolation.build_private_root(layers)
        isolation.choose_remaining_layers(layers)
        isolation.raise_inherited_layers(layers)
        hide_other_packages()
        import_standard_library()
        groups = [None] * (slots + sessions) if tree is None else tree.slots
        Zygote(layers, groups, slots, scratch).serve(socket.socket(fileno=control_fd))

    child = linux.start_process("zygote", serve)
    os.close(control_fd)
    zygote = os.pidfd_open(child)  # a signal may come when the zygote has ended and its id is another's

    def stop(*_: object) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(zygote, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    ended, status = os.wait()
    if ended == guard_pid:  # calls would be refused every signal and process: the worker is restarted
        stop()
        _, status = os.waitpid(child, 0)
    if tree is not None:
        tree.remove()
    import shutil  # here: no call inherits from this process any more

    shutil.rmtree(scratch, ignore_errors=True)
    return abs(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    control_fd, slots, sessions, scratch, sys.prefix, *places = sys.argv[1:]
    sys.exec_prefix, sys.path[:] = sys.prefix, places
    raise SystemExit(launch(int(control_fd), int(slots), int(sessions), scratch))
