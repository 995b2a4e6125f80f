"""Runs a snippet inside the call's own process, as IPython runs a cell.

The value of a last bare expression is shown when nothing was printed. Line numbers in tracebacks are the
snippet's own, `from __future__` works, and no statement runs twice: the last expression is turned into an
assignment in the syntax tree, so that the whole snippet is compiled and executed once.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import io
import linecache
import sys
import threading
import traceback
import types
from typing import Any

FILE_NAME = "source.py"
_LAST_VALUE = "__last_value__"


class CountingFile(io.FileIO):
    """Standard output that knows whether anything was written."""

    written = 0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self.written += count
        return count


def open_standard_streams() -> CountingFile:
    """Give this process fresh text streams over descriptors 0, 1, 2. Returns stdout's counter."""
    counter = CountingFile(1, "w", closefd=False)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8", errors="replace"
    )
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(counter), encoding="utf-8", errors="backslashreplace"
    )
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    return counter


def compile_snippet(source: str, file_name: str = FILE_NAME) -> types.CodeType:
    """Compile, with the value of a last bare expression kept (unless a semicolon follows it)."""
    tree = ast.parse(source, file_name)
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = tree.body[-1]
        target = ast.Name(_LAST_VALUE, ast.Store())
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value, lineno=last.lineno), last)
        ast.fix_missing_locations(tree)
    return compile(tree, file_name, "exec", dont_inherit=True)


def _print_exception(error: BaseException) -> None:
    """The traceback from the snippet's first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    try:
        traceback.print_exception(type(error), error, frame if not isinstance(error, SyntaxError) else None)
    except BaseException:  # a __str__ that raises, or no memory left for the text
        sys.stderr.write(f"{type(error).__name__}\n")


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def new_main_module() -> dict[str, Any]:
    """A fresh `__main__`, so that pickling and multiprocessing find what the snippet defines."""
    module = types.ModuleType("__main__")
    module.__file__ = FILE_NAME
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    return module.__dict__


def run_cell(
    source: str, namespace: dict[str, Any], counter: CountingFile, file_name: str = FILE_NAME
) -> int:
    """Execute `source` in `namespace`; all failures are printed to stderr. Returns the exit code."""
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    written_before = counter.written
    try:
        exec(compile_snippet(source, file_name), namespace)
        value = namespace.pop(_LAST_VALUE, None)
        if value is not None:
            sys.stdout.flush()
            if counter.written == written_before:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:
        _print_exception(error)
        return 1
    return 0


def run_program(source: str, counter: CountingFile) -> int:
    """Run a whole program as `python source.py` would end: threads joined, atexit run, streams flushed."""
    code = run_cell(source, new_main_module(), counter)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:
        _print_exception(error)
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    return code
