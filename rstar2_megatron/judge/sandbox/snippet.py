"""Runs a program inside the call's own process, as IPython runs a cell.

The value of a last bare expression is printed: of a session's cell always, of a whole program when it printed nothing, since
its last line is often a call whose value nobody wants to see. Line numbers in tracebacks are the
program's own, and `from __future__` works. The last expression is compiled apart from the statements before it.
"""

from __future__ import annotations
import __future__

import _ast
import atexit
import base64
import builtins
import contextlib
import gc
import io
import json
import linecache
import os
import random
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from rstar2_megatron.judge.sandbox import linux

FILE_NAME = "source.py"
# Bytes of a cell's program, its files as JSON; its standard input is a descriptor.
CELL_HEADER = struct.Struct("<II")
CELL_DONE = struct.Struct("<i")  # its exit code
_LAST_FRAMES = -1000  # a text of all of a deep recursion would take longer than the call
_replaced_streams: list[Any] = []  # kept alive: closing them would cost each call another 0.15 ms
_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)  # one bit each


class CountingFile(io.FileIO):
    """Standard output that counts the written bytes."""

    written = 0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self.written += count
        return count


@contextlib.contextmanager
def descriptors_of_a_call() -> Iterator[None]:
    """Inside, descriptor 0 is the null device; 1 and 2 are a pipe that holds 64 KB and that nobody reads."""
    saved = [os.dup(fd) for fd in (0, 1, 2)]
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    reader, writer = os.pipe()
    try:
        for source, fd in ((null, 0), (writer, 1), (writer, 2)):
            os.dup2(source, fd)
        yield
    finally:
        for fd, before in enumerate(saved):
            os.dup2(before, fd)
        for fd in (*saved, null, reader, writer):
            os.close(fd)


def make_streams() -> CountingFile:
    """Give this process, the parent of all calls, text streams over descriptors 0, 1 and 2. Returns stdout's file.

    Making them in each call would cost 0.3 ms. A stream tests at its creation whether it can seek, so the descriptors are
    of the same kind as in a call meanwhile: the null device and pipes.
    """
    _replaced_streams.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    with descriptors_of_a_call():
        use_input()
        counter = CountingFile(1, "w", closefd=False)
        buffers = io.BufferedWriter(counter), io.BufferedWriter(io.FileIO(2, "w", closefd=False))
        out, err = (io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace") for buffer in buffers)
        for stream, name in ((out, "<stdout>"), (err, "<stderr>")):
            stream.reconfigure(line_buffering=True)  # what ends a call from outside leaves no time to write
            _name(stream, name, "w")
    sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[misc]
    return counter


def use_input() -> None:
    """Make the stream of standard input anew: that of `make_streams` is for the null device, not for a file."""
    file = io.BufferedReader(io.FileIO(0, "r", closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(file, encoding="utf-8", errors="replace")  # type: ignore[misc]
    _name(sys.stdin, "<stdin>", "r")


def _name(stream: Any, name: str, mode: str) -> None:
    """As Python's own streams are: headers for fast input and output read both."""
    stream.mode = mode
    stream.buffer.raw.name = name


def compile_by_line(source: str, file_name: str) -> tuple[types.CodeType | None, types.CodeType | None] | None:
    """The statements, and apart from them a last bare expression. None for errors, and where the slower way is needed.

    This fast path compiles the last line separately, without an AST, at a third of the cost. It works when that is an
    expression and the lines above it are complete statements.
    """
    text = source.rstrip()
    start = text.rfind("\n") + 1
    if text[start : start + 1].isspace() or "__future__" in text:
        return None
    try:
        above = "\n" * text.count("\n")  # line numbers are the program's own
        last = compile(above + text[start:], file_name, "eval", dont_inherit=True)
        return compile(text[:start], file_name, "exec", dont_inherit=True) if start else None, last
    except (SyntaxError, ValueError):
        return None


def compile_by_tree(source: str, file_name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """As `compile_by_line`, by the AST; a semicolon hides a last expression. Raises what `compile` raises."""
    tree: Any = compile(source, file_name, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr) and not source.rstrip().endswith(";"):
        last = _ast.Expression(tree.body.pop().value)
    statements = compile(tree, file_name, "exec", dont_inherit=True)
    if last is None:
        return statements, None
    futures = statements.co_flags & _FUTURES
    return statements, compile(last, file_name, "eval", flags=futures, dont_inherit=True)


def _print_exception(error: BaseException) -> int:
    """Print the traceback from the program's first frame on, or leave that to its own hook. Returns the exit code."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    try:
        if sys.excepthook is sys.__excepthook__ and not hasattr(sys.modules.get("__main__"), "__file__"):  # a session's cell
            traceback.print_exception(type(error), error, frame, limit=_LAST_FRAMES)
        else:  # Python's own, in C, suggests names, and prints the last 1,000 frames of an endless recursion
            sys.excepthook(type(error), error.with_traceback(frame), frame)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException:  # a hook or a __str__ that raises, or no memory left for the text
        sys.stderr.write(f"{type(error).__name__}\n")
    return 1


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def new_main_module(path: str | None) -> dict[str, Any]:
    """A new `__main__`, in which pickle and multiprocessing find the program's definitions, of the file `path`."""
    module = types.ModuleType("__main__")
    if path is not None:
        module.__file__ = path
    module.__dict__.update(__annotations__={}, __cached__=None)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module.__dict__


def run_cell(
    source: str,
    namespace: dict[str, Any],
    counter: CountingFile,
    file_name: str = FILE_NAME,
    *,
    shows: bool = True,
    shows_always: bool = False,
) -> int:
    """Execute `source` in `namespace`; all failures are printed to stderr. Returns the exit code.

    `shows`: a last bare expression's value is printed where nothing else was, `shows_always`: also where something was. What
    was written to descriptor 1 past `sys.stdout` is not known of.
    """
    source = source.removeprefix("\ufeff")  # a byte-order mark
    lines = io.StringIO(f"{source}\n", None).readlines()  # as linecache has a file's: each with its end, \n
    linecache.cache[file_name] = (len(source), None, lines, file_name)
    written_before = counter.written
    try:
        statements, last = compile_by_line(source, file_name) or compile_by_tree(source, file_name)
        if statements is not None:
            exec(statements, namespace)
        value = None if last is None else eval(last, namespace)
        if value is not None and (shows_always or (shows and sys.stdout is sys.__stdout__)):
            sys.stdout.flush()
            if shows_always or counter.written == written_before:
                _show(value, shows_always)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:
        return _print_exception(error)
    return 0


def _show(value: Any, must: bool) -> None:
    """A whole program that ends with a value has ended well, whether or not the value can be shown."""
    try:
        sys.stdout.write(f"{value!r}\n")
    except Exception:
        if must:
            raise


def write_program(source: str, path: str) -> None:
    """Write the program to the file that `__file__` names, for programs that read themselves and processes that import it."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(file, source.encode("utf-8", "surrogatepass"))
        os.close(file)
    except OSError:  # no room: it runs all the same
        return


def run_program(source: str, counter: CountingFile, shows: bool) -> int:
    """Run a whole program as `python source.py` would: at its end threads are joined, atexit and finalizers run."""
    code = run_cell(source, sys.modules["__main__"].__dict__, counter, shows=shows)
    try:
        if threading.active_count() > 1 or threading._threading_atexits:  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:
        _print_exception(error)
        code = code or 1
    flush_streams()
    sys.modules.pop("__main__", None)
    gc.collect()  # what the program's names held: its functions hold the names, so only this finds them
    flush_streams()
    return code


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # closed, or the program's own; contextlib costs each call eight pages
            continue
    linux.flush_c_streams(None)


def end_at_limit(number: int, _: object) -> None:
    """The handler of SIGXCPU: the call is at a limit. What was printed without a line's end is written first."""
    flush_streams()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# The C function below random.seed: a method in Python would cost each call eight pages.
_seed_random = super(random.Random, random.seed.__self__).seed  # type: ignore[attr-defined]


def reseed() -> None:
    """Reseed `random` and numpy: forked calls would otherwise all draw the same numbers."""
    _seed_random()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))


def write_files(files: dict[str, str]) -> None:
    """Write a submission's files (path -> base64) to the working directory. ValueError names one that cannot be written."""
    for path, content in files.items():
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "wb") as file:
                file.write(base64.b64decode(content))
        except OSError as error:
            raise ValueError(f"files: {path!r} cannot be written: {error}") from None


# -------------------------------------------------------------------------------------- live interpreters


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """`size` bytes. EOFError when the other side has closed the socket."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def serve_cells(channel: socket.socket, counter: CountingFile) -> NoReturn:
    """Run the cells from `channel` in one namespace, one after another, until it closes.

    An interrupted cell (SIGINT at its time limit) keeps the namespace. Each cell starts with the session's original
    standard streams and its own standard input.
    """
    namespace = new_main_module(None)
    streams = sys.stdout, sys.stderr
    interpreter = os.getpid()
    number = 0
    while True:
        try:
            header, stdin, _, _ = socket.recv_fds(channel, CELL_HEADER.size, 1)
            if not header:
                raise EOFError
            program, files = (receive_exactly(channel, size) for size in CELL_HEADER.unpack(header))
        except KeyboardInterrupt:  # it arrived as the last cell ended
            continue
        except EOFError:  # the slot has gone
            os._exit(0)
        number += 1
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdout, sys.stderr = streams
            os.dup2(stdin[0], 0)
            os.close(stdin[0])
            use_input()
            write_files(json.loads(files))
            text = program.decode("utf-8", "surrogatepass")
            code = run_cell(text, namespace, counter, f"cell_{number}.py", shows_always=True)
            for stream in (sys.stdout, sys.stderr, *streams):
                with contextlib.suppress(Exception):
                    stream.flush()
        except BaseException as error:
            code = _print_exception(error)
        if os.getpid() != interpreter:  # the cell forked: its child ends where the cell ends
            os._exit(code)
        channel.sendall(CELL_DONE.pack(code))
