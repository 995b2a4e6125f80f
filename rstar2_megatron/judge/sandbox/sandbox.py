"""Forks a process that enters the isolation of its slot and runs a program. Only the child reads the program."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from rstar2_megatron.judge.sandbox import cpp, isolation, linux, snippet
from rstar2_megatron.judge.sandbox.isolation import CALL_DIRECTORY, IsolationLayers
from rstar2_megatron.judge.sandbox.linux import Step
from rstar2_megatron.judge.sandbox.process_tree import children

WARMUPS = 12  # Python 3.11 specialises what has run 8 times
_CHANNEL = 3  # a live interpreter's descriptor of the socket that delivers its cells
_MOST_TOLD = 4096  # bytes of a failure; every pipe holds as many


class Program(NamedTuple):
    """The part of a job that the call's process needs."""

    kind: str  # "python" or "cpp"
    source: str
    files: dict[str, str] | None  # path -> base64
    has_input: bool  # standard input is a file, not the null device
    directory: str  # working directory
    cpu_seconds: int  # -1: no limit
    memory_bytes: int  # of address space, beyond that at its start
    shows: bool = True  # the value of a last bare expression, where nothing was printed


def oom_score_steps() -> tuple[list[Step], list[Step]]:
    """Steps before and after a fork that make the kernel kill the child first when memory is short.

    The child inherits its parent's OOM score: writing that twice costs a tenth of opening the child's own file.
    """
    # The score stays as it is without /proc, or where it may not be written.
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        own = os.pread(fd, 16, 0)
        if os.pwrite(fd, own, 0) == len(own):
            return [("oom score", 4, os.pwrite, (fd, b"1000", 0))], [("oom score", len(own), os.pwrite, (fd, own, 0))]
    return [], []


class Sandbox:
    """Forks calls, in the process that is the parent of a slot's calls."""

    def __init__(self, layers: IsolationLayers, slot: int, *, live: bool = False) -> None:
        """`live`: the process becomes a session's interpreter, which reads cells from a channel."""
        self.layers = layers
        self.slot = slot
        self.live = live
        # A child tells by this pipe why it did not begin its program. It closes its own end, `failure_fd`, before the program.
        self.failures, self.failure_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.failure_fd = _CHANNEL + live
        # a live interpreter, which is forked only once, makes its own
        self.new_directory = [] if live else isolation.directory_steps(layers, slot)
        if self.new_directory:
            self.new_directory.insert(0, linux.return_step("mnt", linux.CLONE_NEWNS))
        self.steps = self._steps(CALL_DIRECTORY)
        with open("/proc/self/statm") as file:  # a call starts with the same
            self.address_space = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        self.before_fork, self.after_fork = oom_score_steps()
        self.namespaced = "pid_namespace" in layers.active
        if self.namespaced:
            self.before_fork.append(linux.unshare_step(linux.CLONE_NEWPID))
            self.after_fork.append(linux.return_step("pid", linux.CLONE_NEWPID))
        # Everything that is the same for all calls is done here, once.
        self.counter = snippet.make_streams()
        sys.argv[:] = [snippet.FILE_NAME]
        sys.path_importer_cache.pop(CALL_DIRECTORY, None)  # that there is no such directory
        if not live:  # a live interpreter is forked only once
            signal.signal(signal.SIGXCPU, snippet.end_at_limit)
            self.program_file = os.devnull
            self._warm_up()
            self.program_file = snippet.FILE_NAME
            gc.freeze()  # the collection at a call's end would write to, and so copy, what it inherits
            snippet.new_main_module(f"{CALL_DIRECTORY}/{snippet.FILE_NAME}")

    def make_directory(self) -> None:
        """Make the next call's mount namespace with its working directory, and drop the last call's.

        The kernel drops a namespace after all cores have passed a point of rest: a millisecond, on a busy machine 100. So
        this process keeps it until a call's end is told, and no call waits for that at its own end.
        """
        linux.do(self.new_directory)

    def _steps(self, directory: str) -> list[Step]:
        free_fd = self.failure_fd + 1
        return [
            linux.close_from_step(free_fd),
            *(isolation.directory_steps(self.layers, self.slot) if self.live else []),
            # A process group and not a session: where the kernel weighs sessions (autogroup), niceness has no effect
            # between calls in different sessions.
            ("setpgid", None, os.setpgid, (0, 0)),
            # Orphans become the program's children: their CPU time counts as its own.
            linux.prctl_step("adopt orphans", linux.PR_SET_CHILD_SUBREAPER, 1),
            *isolation.isolation_steps(self.layers, self.slot, directory, free_fd),
        ]

    def fork(self, begin: Callable[[], Any]) -> int:
        """Start a process that calls `begin`, which should not return. Returns the process id."""
        try:
            linux.do(self.before_fork)
            if self.namespaced:
                self.init = linux.start_init()
            pid = linux.fork()
            if pid == 0:
                try:
                    begin()
                finally:
                    os._exit(1)
        finally:
            linux.do(self.after_fork)
        return pid

    def become(self, program: tuple[Any, ...], descriptors: tuple[int, ...]) -> NoReturn:
        """In the child: enter the isolation and run the program (a Program or its plain tuple). Ends this process.

        `descriptors` become 0, 1, 2, and a live interpreter's `_CHANNEL`.
        """
        try:
            self._enter(program, (*descriptors, self.failure_writer))
            os.close(self.failure_fd)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                told = str(error) if isinstance(error, ValueError) else repr(error)
                os.write(self.failure_fd, told.encode("utf-8", "backslashreplace")[:_MOST_TOLD])
            os._exit(1)
        code = 1
        try:
            code = self._run(program)
        finally:
            os._exit(code)

    def failure(self) -> str:
        """Why the last child, which has ended, did not begin its program; "" when it did."""
        try:
            return os.read(self.failures, _MOST_TOLD).decode("utf-8", "replace")
        except BlockingIOError:
            return ""

    def _enter(self, program: tuple[Any, ...], descriptors: tuple[int, ...]) -> None:
        # No target is a later source: the pipe's writer is above 3, because its reader was opened first.
        for target, source in enumerate(descriptors):
            os.dup2(source, target)
        kind, source, files, _, directory, cpu_s, memory_bytes, _ = program
        memory = self.address_space + memory_bytes
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + (cpu_s >= 0)))  # SIGXCPU, a second later SIGKILL
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        linux.do(self.steps if directory == CALL_DIRECTORY else self._steps(directory))
        if self.live:
            return
        if kind == "python":
            snippet.write_program(source, self.program_file)
        if files:
            snippet.write_files(files)

    def _run(self, program: tuple[Any, ...]) -> int:
        """Run the program. Returns its exit code; C++ programs and live interpreters do not return."""
        kind, source, _, has_input, directory, cpu_s, _, shows = program
        if directory != sys.path[0]:  # without a private tmpfs
            sys.path[0] = os.environ["HOME"] = os.environ["TMPDIR"] = directory
            sys.modules["__main__"].__file__ = f"{directory}/{snippet.FILE_NAME}"
        if kind == "cpp":
            return cpp.build_and_run(source, cpu_s - 1)
        if has_input:
            snippet.use_input()
        snippet.reseed()
        if self.live:
            snippet.serve_cells(socket.socket(fileno=_CHANNEL), self.counter)
        return snippet.run_program(source, self.counter, shows)

    def _warm_up(self) -> None:
        """Go through a call here, with arguments that change nothing.

        Calls then inherit the interpreter's specialised code and caches, and do not write (and so copy) those pages
        themselves. Done in each call parent, because pages shared by all of them cost more to copy.
        """
        rlimits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS)}
        (_, cpu_s), (_, memory) = rlimits.values()
        prepared = self.steps
        self.steps = [("no system call", -1, linux.system_call, (-1,))] * 10
        with snippet.descriptors_of_a_call():
            for source in ("import math\nx = 3\nprint(x + 1)", "1 + 1") * WARMUPS:
                program = (
                    "python",
                    source,
                    None,
                    False,
                    CALL_DIRECTORY,
                    cpu_s - (cpu_s > 0),
                    memory - self.address_space,
                    True,
                )
                self._enter(program, (0, 1, 2))
                snippet.new_main_module(None)
                self._run(program)
        for kind, limit in rlimits.items():
            resource.setrlimit(kind, limit)
        self.steps = prepared

    def end_orphans(self) -> None:
        """Kill what the last child, which has ended, has left: by its PID namespace, else as children of this process."""
        if self.namespaced:
            os.kill(self.init, signal.SIGKILL)
            os.waitpid(self.init, 0)
            return
        deadline = time.monotonic() + 5.0
        while (orphans := children(os.getpid())) and time.monotonic() < deadline:
            for orphan in orphans:
                with contextlib.suppress(OSError):
                    os.kill(orphan, signal.SIGKILL)
                    os.waitpid(orphan, 0)
