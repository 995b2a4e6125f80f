"""A program runs as `python source.py` does: the same output, and the same exit code or signal, as from this Python."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from rstar2_megatron.settings.schema import CodeJudgeSettings
from tests.judge.conftest import Run

# A line `## NAME` begins each.
PROGRAMS = """
## its own file
print(len(open(__file__).read()), __file__.endswith('/source.py'))
## its name on the command line
import sys; print(open(sys.argv[0]).read()[:10])
## files beside it
import os, pathlib; print(pathlib.Path(__file__).parent == pathlib.Path.cwd(), os.listdir())
## its source
import inspect
def f(): return 1
print(inspect.getsource(f))
## itself as a script
import subprocess, sys
if len(sys.argv) > 1:
    print('child')
else:
    print(subprocess.run([sys.executable, __file__, 'x'], capture_output=True, text=True))
## spawn
import multiprocessing as mp
def square(x): return x * x
if __name__ == '__main__':
    with mp.get_context('spawn').Pool(2) as pool: print(pool.map(square, range(4)))
## an executor of spawned processes
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
SCALE = 3
def scaled(x): return SCALE * x
if __name__ == '__main__':
    with ProcessPoolExecutor(2, mp_context=mp.get_context('spawn')) as pool: print(list(pool.map(scaled, range(4))))
## shared values
import multiprocessing as mp
v = mp.Value('i', 0)
def f():
    with v.get_lock(): v.value += 1
ps = [mp.Process(target=f) for _ in range(3)]
[p.start() for p in ps]; [p.join() for p in ps]; print(v.value)
## a queue
import multiprocessing as mp
q = mp.Queue()
p = mp.Process(target=q.put, args=(5,))
p.start()
print(q.get())
p.join()
## a terminated child
import multiprocessing as mp, time
p = mp.Process(target=time.sleep, args=(60,))
p.start()
p.terminate(); p.join(); print(p.exitcode)
## a byte-order mark
\ufeffprint('marked')
## streams have names and modes
import sys
print([(s.name, s.mode) for s in (sys.stdin, sys.stdout, sys.stderr)])
## __builtins__ is a module
from math import *
print(__builtins__.sum([1, 2]), type(__builtins__).__name__)
## a value that cannot be shown
class A:
    def __repr__(self): raise ValueError
A()
## sys.excepthook
import sys
def hook(kind, value, trace): print('hook', kind.__name__, trace.tb_lineno)
sys.excepthook = hook
1 / 0
## a hook that exits
import sys
sys.excepthook = lambda *_: sys.exit(7)
1 / 0
## __del__
class A:
    def __del__(self): print('gone', LATE)
LATE = 1
a = A()
## __del__ without a cycle
import io
class A(io.StringIO):
    def close(self): print('closed')
a = A()
## a generator's finally
def g():
    try: yield 1
    finally: print('left')
x = g()
y = next(x)
## a context manager in a generator
import contextlib
@contextlib.contextmanager
def c():
    try: yield
    finally: print('left')
m = c(); y = m.__enter__()
## weakref.finalize
import weakref
class A: pass
a = A()
f = weakref.finalize(a, print, 'finalized')
## an open file
import os
f = os.fdopen(os.dup(1), 'w')
n = f.write('at its end')
## the order of the end
import atexit
class A:
    def __del__(self): print('3 del')
a = A()
u = atexit.register(print, '2 atexit')
print('1 main')
## atexit after an exception
import atexit
u = atexit.register(print, 'bye')
raise ValueError
## atexit after sys.exit
import atexit, sys
u = atexit.register(print, 'bye')
sys.exit(3)
## an exception in atexit
import atexit
def f(): raise ValueError
u = atexit.register(print, 'after')
u = atexit.register(f)
## sys.exit in atexit
import atexit, sys
u = atexit.register(print, 'after'), atexit.register(sys.exit, 5)
## C's own streams
import ctypes
n = ctypes.CDLL(None).printf(b'from C')
## standard streams as files
print(open('/dev/stdin').read() == '', file=open('/dev/stdout', 'w'))
## names of the main module
print(__annotations__, __cached__, __spec__, __doc__)
## shared memory
from multiprocessing import shared_memory
one = shared_memory.SharedMemory(create=True, size=10)
one.buf[0] = 5
other = shared_memory.SharedMemory(one.name)
print(other.buf[0])
other.close(), one.close(), one.unlink()
## joblib
from joblib import Parallel, delayed
print(Parallel(n_jobs=2)(delayed(abs)(-n) for n in range(4)))
## SIGTERM
import os
print('before', flush=True)
os.kill(os.getpid(), 15)
print('after')
## SIGTERM with a handler
import os, signal
h = signal.signal(15, lambda *_: print('handled'))
os.kill(os.getpid(), 15)
## SIGTERM ignored
import os, signal
h = signal.signal(15, signal.SIG_IGN)
os.kill(os.getpid(), 15)
print('after')
## SIGKILL
import os; os.kill(os.getpid(), 9)
## SIGHUP
import os; os.kill(os.getpid(), 1)
## SIGUSR1
import signal; signal.raise_signal(signal.SIGUSR1)
## its group
import os; os.setpgid(0, 0); os.killpg(0, 15)
## alarm
import signal
old = signal.alarm(1)
while True: pass
## alarm with a handler
import signal
def f(*_): raise TimeoutError
h = signal.signal(signal.SIGALRM, f), signal.alarm(1)
try:
    while True: pass
except TimeoutError: print('in time')
## setitimer
import signal
old = signal.setitimer(signal.ITIMER_REAL, 0.1)
while True: pass
## abort
import os; os.abort()
## a broken pipe
import os, signal
h = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
r, w = os.pipe()
os.close(r)
n = os.write(w, b'x')
## Ctrl-C
import os, signal
try: os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt: print('interrupted')
## an orphan
import os, time
if os.fork() == 0:
    if os.fork() == 0: time.sleep(0.05)
    os._exit(0)
s = os.wait()
print(s[1])
"""
BY_NAME = dict(part.split("\n", 1) for part in PROGRAMS[4:].split("\n## "))


@pytest.mark.parametrize("name", BY_NAME)
def test_it_does_what_it_does_as_a_file(run: Run, tmp_path: Path, name: str) -> None:
    program = BY_NAME[name]
    (tmp_path / "source.py").write_text(program)
    command = ["env", "--default-signal", sys.executable, "source.py"]  # whatever the tests were started with
    as_file = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    result = run(program, options={"time_limit_s": "10"})
    place = "/tmp/judge-call/"
    expected = as_file.stdout.replace(f"{tmp_path}/", place)
    assert result["stdout"] == expected, (result, as_file)
    assert result["exit_code"] == (as_file.returncode if as_file.returncode >= 0 else 128 - as_file.returncode)
    assert result["signal"] == (-as_file.returncode if as_file.returncode < 0 else None)


TRACEBACKS = {
    "the last line, without a line's end": "x = 1\nprint(1 + int('a'))",
    "lines of DOS": "x = 1\r\nprint(1 + int('a'))\r\n",
    "a statement beside others": "y = 1; assert y == 2, y",
    "line separators in a text": "t = '''a\x0cb\u2028c'''\nprint(\n    t.nothing)",
    "a syntax error of a text that it evaluates": "def f(t):\n    return eval(t)\nprint(f('2 x'))",
    "a syntax error of a text that it runs": "try:\n    exec('a b')\nexcept SyntaxError as e:\n    raise ValueError from e",
    "a syntax error that it raises": "raise SyntaxError('mine')",
    "a program that does not compile": "x = 1\nprint(x y)",
    "a name that is nearly right": "import math\nmath.sqr(2)",
    "a recursion without an end": "import sys\nsys.setrecursionlimit(20000)\ndef f(n):\n    return f(n + 1)\nf(0)",
}


@pytest.mark.parametrize("name", TRACEBACKS)
def test_a_traceback_is_that_of_the_file(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "source.py").write_bytes(TRACEBACKS[name].encode())
    as_file = subprocess.run([sys.executable, "source.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run(TRACEBACKS[name])["stderr"].strip() == as_file.stderr.replace(f"{tmp_path}/", "").strip()


async def test_what_the_service_was_started_to_ignore_ends_a_program(tmp_path: Path) -> None:
    service = JudgeService(CodeJudgeSettings(num_workers=1), tmp_path / "judge.log")
    signals = (signal.SIGHUP, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        service.begin()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    try:
        async with JudgeClient(service.wait_ready()) as client:
            for number in signals:
                result = await client.run(f"import signal; signal.raise_signal({int(number)}); print('goes on')")
                assert (result.signal, result.stdout) == (number, "")
    finally:
        service.stop()


def test_a_user_has_a_name(run: Run) -> None:
    program = "import getpass, os, pwd\nprint(getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name)"
    assert run(program)["stdout"] == "program program\n"


def test_where_a_program_differs_from_a_file(run: Run) -> None:
    """As docs/judge.md tells."""
    result = run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    assert (result["exit_code"], result["signal"]) == (1, None) and "KeyboardInterrupt" in result["stderr"]
    assert run("import sys\nclass A:\n    def __del__(self): print('gone')\nsys.mine = A()")["stdout"] == ""
    assert run("print('a line')\nimport os; os._exit(0)")["stdout"] == "a line\n"
    assert run("import inspect; print('\\ud800', len(inspect.stack()) > 1)")["stdout"] == "\\ud800 True\n"
    assert "NameError" in run("__file__", options={"session": "without-a-file"})["stderr"]


def test_a_submissions_own_file_of_that_name_stays(run: Run) -> None:
    result = run("print(open(__file__).read())", options={"files": {"source.py": "mine"}})
    assert result["stdout"] == "mine\n", result


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import multiprocessing as mp\nm = mp.Manager()", "PermissionError"),
        ("import multiprocessing as mp\nwith mp.get_context('forkserver').Pool(1) as p: p.map(abs, [1])", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
    ],
)
def test_what_needs_a_socket_fails_at_once(run: Run, program: str, told: str) -> None:
    result = run(program, options={"time_limit_s": "20", "output_chars": "10000"})
    assert result["outcome"] == "error" and told in result["stderr"], result


@pytest.mark.parametrize(
    "call",
    [
        "subprocess.run(['pip', 'install', 'foo'], capture_output=True, text=True).stderr",
        "subprocess.run(['pip3', 'install', '-q', 'foo'], capture_output=True, text=True).stderr",
        "subprocess.run([sys.executable, '-m', 'pip', 'install', 'foo'], capture_output=True, text=True).stderr",
        "subprocess.getoutput('python3 -m pip install foo')",
        "os.system('pip install foo 2>&1')",
        "os.popen('pip install foo 2>&1').read()",
    ],
)
def test_pip_ends_with_a_sentence(run: Run, call: str) -> None:
    result = run(f"import os, subprocess, sys\nprint({call})")
    assert "pip cannot install anything here, because programs have no network" in result["stdout"], result
    assert result["outcome"] == "ok"
