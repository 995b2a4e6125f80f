"""A program runs as `python source.py` does: the same output, and the same exit code or signal, as from this Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.judge.conftest import Run

SPAWN = """
import multiprocessing as mp
def square(x): return x * x
if __name__ == '__main__':
    with mp.get_context('spawn').Pool(2) as pool: print(pool.map(square, range(4)))
"""
SPAWN_EXECUTOR = """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
SCALE = 3
def scaled(x): return SCALE * x
if __name__ == '__main__':
    with ProcessPoolExecutor(2, mp_context=mp.get_context('spawn')) as pool: print(list(pool.map(scaled, range(4))))
"""
PROGRAMS = {
    "its own file": "print(len(open(__file__).read()), __file__.endswith('/source.py'))",
    "its name on the command line": "import sys; print(open(sys.argv[0]).read()[:10])",
    "files beside it": "import os, pathlib; print(pathlib.Path(__file__).parent == pathlib.Path.cwd(), os.listdir())",
    "its source": "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
    "itself as a script": "import subprocess, sys\n"
    "if len(sys.argv) == 1: print(subprocess.run([sys.executable, __file__, 'x'], capture_output=True, text=True))\n"
    "else: print('child')",
    "spawn": SPAWN,
    "an executor of spawned processes": SPAWN_EXECUTOR,
    "shared values": "import multiprocessing as mp\nv = mp.Value('i', 0)\ndef f():\n    with v.get_lock(): v.value += 1\n"
    "ps = [mp.Process(target=f) for _ in range(3)]\n[p.start() for p in ps]; [p.join() for p in ps]; print(v.value)",
    "a queue": "import multiprocessing as mp\nq = mp.Queue()\np = mp.Process(target=q.put, args=(5,)); p.start(); print(q.get()); p.join()",
    "a terminated child": "import multiprocessing as mp, time\np = mp.Process(target=time.sleep, args=(60,))\np.start()\n"
    "p.terminate(); p.join(); print(p.exitcode)",
    "a byte-order mark": "\ufeffprint('marked')",
    "sys.excepthook": "import sys\nsys.excepthook = lambda kind, value, trace: print('hook', kind.__name__, trace.tb_lineno)\n1 / 0",
    "a hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(7)\n1 / 0",
    "__del__": "class A:\n    def __del__(self): print('gone', LATE)\nLATE = 1\na = A()",
    "__del__ without a cycle": "import io\nclass A(io.StringIO):\n    def close(self): print('closed')\na = A()",
    "a generator's finally": "def g():\n    try: yield 1\n    finally: print('left')\nx = g()\ny = next(x)",
    "a context manager in a generator": "import contextlib\n@contextlib.contextmanager\ndef c():\n    try: yield\n"
    "    finally: print('left')\nm = c(); y = m.__enter__()",
    "weakref.finalize": "import weakref\nclass A: pass\na = A()\nf = weakref.finalize(a, print, 'finalized')",
    "an open file": "import os\nf = os.fdopen(os.dup(1), 'w')\nn = f.write('at its end')",
    "the order of the end": "import atexit\nclass A:\n    def __del__(self): print('3 del')\na = A()\natexit.register(print, '2 atexit')\n"
    "print('1 main')",
    "atexit after an exception": "import atexit\nu = atexit.register(print, 'bye')\nraise ValueError",
    "atexit after sys.exit": "import atexit, sys\nu = atexit.register(print, 'bye')\nsys.exit(3)",
    "an exception in atexit": "import atexit\ndef f(): raise ValueError\nu = atexit.register(print, 'after'), atexit.register(f)",
    "sys.exit in atexit": "import atexit, sys\nu = atexit.register(print, 'after'), atexit.register(sys.exit, 5)",
    "SIGTERM": "import os\nprint('before', flush=True)\nos.kill(os.getpid(), 15)\nprint('after')",
    "SIGTERM with a handler": "import os, signal\nh = signal.signal(15, lambda *_: print('handled'))\nos.kill(os.getpid(), 15)",
    "SIGTERM ignored": "import os, signal\nh = signal.signal(15, signal.SIG_IGN)\nos.kill(os.getpid(), 15)\nprint('after')",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGHUP": "import os; os.kill(os.getpid(), 1)",
    "SIGUSR1": "import signal; signal.raise_signal(signal.SIGUSR1)",
    "its group": "import os; os.setpgid(0, 0); os.killpg(0, 15)",
    "alarm": "import signal\nold = signal.alarm(1)\nwhile True: pass",
    "alarm with a handler": "import signal\ndef f(*_): raise TimeoutError\nh = signal.signal(signal.SIGALRM, f), signal.alarm(1)\n"
    "try:\n    while True: pass\nexcept TimeoutError: print('in time')",
    "setitimer": "import signal\nold = signal.setitimer(signal.ITIMER_REAL, 0.1)\nwhile True: pass",
    "abort": "import os; os.abort()",
    "a broken pipe": "import os, signal\nh = signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nr, w = os.pipe()\nos.close(r)\nn = os.write(w, b'x')",
    "Ctrl-C": "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('interrupted')",
    "an orphan": "import os, time\nif os.fork() == 0:\n    if os.fork() == 0: time.sleep(0.05)\n    os._exit(0)\ns = os.wait()\nprint(s[1])",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_it_does_as_a_file(run: Run, tmp_path: Path, name: str) -> None:
    program = PROGRAMS[name]
    (tmp_path / "source.py").write_text(program)
    command = [sys.executable, "source.py"]
    as_file = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    result = run(program, options={"time_limit_s": "10"})
    place = "/tmp/judge-call/"
    expected = as_file.stdout.replace(f"{tmp_path}/", place)
    assert result["stdout"] == expected, (result, as_file)
    assert result["exit_code"] == (as_file.returncode if as_file.returncode >= 0 else 128 - as_file.returncode)
    assert result["signal"] == (-as_file.returncode if as_file.returncode < 0 else None)


def test_a_user_has_a_name(run: Run) -> None:
    program = "import getpass, os, pwd\nprint(getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name, os.path.expanduser('~') == os.getcwd())"
    assert run(program)["stdout"] == "program program True\n"


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
