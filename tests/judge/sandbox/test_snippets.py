"""What a program sees: IPython's last line, honest tracebacks, exit codes, limits."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from types import CodeType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_megatron.judge.sandbox.snippet import compile_by_line, compile_by_tree
from tests.judge.conftest import MEMORY_MB, Run


@pytest.mark.parametrize(
    ("program", "stdout"),
    [
        ("1 + 1", "2\n"),
        ("x = 3\nx * 'ab'", "'ababab'\n"),
        ("print('said')\n5", "said\n"),
        ("None", ""),
        ("5;", ""),
        ("'only a string'", "'only a string'\n"),
        ("from __future__ import annotations\nx: Undefined = 1\nx", "1\n"),
        ("import os\nos.write(1, b'raw')\nNone", "raw"),
        ("import sympy\nx = sympy.symbols('x')\nsympy.solve(x**2 - 4)", "[-2, 2]\n"),
        ("import numpy as np\nnp.arange(3).sum()", "np.int64(3)\n"),
        ("def f(n): return 1 if n < 2 else n * f(n - 1)\nprint(f(10))", "3628800\n"),
        ("if __name__ == '__main__': print('main')", "main\n"),
        ("import sys; sys.stdout.buffer.write(bytes([0xff, 0x41]))\nNone", "\\xffA"),
        ("import atexit; atexit.register(print, 'bye')\nNone", "bye\n"),
        ("import threading\nthreading.Timer(0.1, print, ['late']).start()\nNone", "late\n"),
        ("input() + input()", "'ab'\n"),
        ("import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))", "7\n"),
        ("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))", "[1, 2]\n"),
        ("open('f', 'w').write('kept')\nopen('f').read()", "'kept'\n"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))", "3\n"),
        ("from concurrent.futures import ThreadPoolExecutor as T\nT().submit(print, 'pooled')\nNone", "pooled\n"),
        ("x = 1\n(x +\n1)", "2\n"),
        ("x = 1 + \\\n2", ""),
        ("x = '''\n1 # '''", ""),
        ("if True:\n    y = 4\ny  # the last line", "4\n"),
        ("x = 0\nif x:\n    1\nelse:\n    2", ""),
        ("\n\n(n := 7)\n\n", "7\n"),
    ],
)
def test_output(run: Run, program: str, stdout: str) -> None:
    result = run(program, input="a\nb\n")
    assert (result["stdout"], result["stderr"], result["outcome"]) == (stdout, "", "ok")


def test_traceback_shows_the_programs_own_lines_only(run: Run, tmp_path: Path) -> None:
    """As Python itself shows them, whose marks differ by version."""
    source = tmp_path / "source.py"
    source.write_text("def f():\n    return 1 / 0\n\nf()")
    result = run(source.read_text())
    plain = subprocess.run([sys.executable, source], capture_output=True, text=True).stderr.replace(str(source), "source.py")
    assert result["stderr"].splitlines() == plain.splitlines()
    assert plain.startswith('Traceback (most recent call last):\n  File "source.py", line 4, in <module>\n    f()\n')
    assert (result["outcome"], result["exit_code"], result["reason"]) == ("error", 1, "")


def test_syntax_error(run: Run) -> None:
    stderr = run("x = 1\ny = (\n")["stderr"]
    assert 'File "source.py", line 2' in stderr and "SyntaxError" in stderr
    assert "rstar2" not in stderr


def test_raising_last_expression_runs_once(run: Run) -> None:
    result = run("def f():\n    print('ran')\n    raise KeyError(3)\nf()")
    assert result["stdout"] == "ran\n" and result["stderr"].rstrip().endswith("KeyError: 3")


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('words')", 1),
        ("import os; os._exit(9)", 9),
        ("raise SystemExit(300)", 44),
        ("exit(2)", 2),
    ],
)
def test_exit_codes(run: Run, program: str, code: int) -> None:
    result = run(program)
    assert result["exit_code"] == code
    assert result["run_success"] is (code == 0)
    assert ("words" in result["stderr"]) is ("words" in program)


def test_segfault_is_told_by_signal(run: Run) -> None:
    result = run("import ctypes; ctypes.string_at(0)")
    assert (result["outcome"], result["signal"], result["exit_code"]) == ("killed", 11, 139)


def test_calls_share_no_random_state(run: Run) -> None:
    program = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = (run(program)["stdout"].split() for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1]


def test_memory_limit(run: Run) -> None:
    result = run(f"x = bytearray({2 * MEMORY_MB} << 20)")
    assert result["outcome"] == "memory" and not result["run_success"]
    assert run(f"len(bytearray({MEMORY_MB // 2} << 20))")["outcome"] == "ok"


def test_output_is_shortened_in_the_middle(run: Run) -> None:
    result = run("print('a' * 5000 + 'z')", options={"output_chars": "300"})
    assert len(result["stdout"]) == 300 and result["truncated"] and result["outcome"] == "ok"
    assert result["stdout"].startswith("aaa") and result["stdout"].endswith("az\n")


def test_comparison_sees_the_whole_output(run: Run) -> None:
    result = run("print('a' * 5000)", expected_output="a" * 5000)
    assert result["success"] and result["truncated"]


def test_output_that_fills_the_pipe_at_once_is_whole(run: Run) -> None:
    assert run("print('a' * 1_000_000)", expected_output="a" * 1_000_000)["success"]


def test_a_warning_of_the_compiler_comes_once(run: Run) -> None:
    for program in ("x = 1\nx is 1", "x = 1 is 1\ny = 1 + \\\n2"):
        assert run(program)["stderr"].count("SyntaxWarning") == 1


_LINES = ("x = 1", "x", "1 + 1", "print(x)", "x;", "if x:", "else:", "    y = 2", "    x", "x = (", "(", ")", "'''")
_LINES += ("x = '''", "1 # '''", "x = 1 + \\", "\\", "# word", "", "@abs", "def f(): x", "(z := 3)", "for x in 2, 3:")


def _execute(compiled: tuple[CodeType | None, CodeType | None]) -> tuple[str, str, list[str]]:
    """What it prints, shows and leaves behind."""
    statements, last = compiled
    out, namespace, shown = io.StringIO(), {}, ""  # type: ignore[var-annotated]
    with contextlib.redirect_stdout(out):
        try:
            if statements is not None:
                exec(statements, namespace)
            shown = repr(None if last is None else eval(last, namespace))
        except Exception as error:
            shown = f"{error!r} in line {error.__traceback__.tb_next.tb_lineno}"  # type: ignore[union-attr]
    return out.getvalue(), shown, sorted(namespace)


@settings(max_examples=500)
@given(st.lists(st.sampled_from(_LINES), min_size=1, max_size=7).map("\n".join))
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_the_last_line_by_itself_means_what_it_means_in_the_program(source: str) -> None:
    by_line = compile_by_line(source, "source.py")
    if by_line is not None:
        assert _execute(by_line) == _execute(compile_by_tree(source, "source.py"))


def test_options_never_exceed_the_services_limits(run: Run) -> None:
    result = run(f"x = bytearray({2 * MEMORY_MB} << 20)", options={"memory_mb": str(10 * MEMORY_MB)})
    assert result["outcome"] == "memory"


def test_deep_recursion_is_an_error(run: Run) -> None:
    result = run("def f(n): return f(n + 1)\nf(0)")
    assert result["outcome"] == "error" and "RecursionError" in result["stderr"]
