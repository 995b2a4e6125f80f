"""Programs that try to leave the sandbox, or to see or change what is not theirs.

Each must fail, and leave the service and a call beside it untouched. An attack that needs a layer which this
machine does not give is skipped by that layer's name.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.judge.client.service import JudgeService
from tests.judge.calls import HELD, let_go, until_marked
from tests.judge.conftest import SECRET, Run
from tests.judge.sandbox.conftest import need

pytestmark = pytest.mark.usefixtures("service_untouched")

PIECES = [
    "import os, sys, signal",
    "os.close(1)",
    "os.close(0); os.close(2)",
    "sys.stdout = None",
    "sys.modules.clear()",
    "del __builtins__",
    "signal.raise_signal(11)",
    "os.kill(0, 15)",
    "os.fork()",
    "os.chdir('/proc')",
    "raise BaseException",
    "while os.fork() == 0: pass",
    "sys.setrecursionlimit(10**9); f = lambda: f(); f()",
    "print(chr(0) * 1000, chr(0xD800))",
    "import ctypes; ctypes.memset(id(1), 255, 4096)",
    "os.dup2(0, 1)",
]


def test_environment_holds_no_secret(run: Run) -> None:
    program = "import os\nfor k, v in os.environ.items(): print(k, v)"
    shown = run(program, options={"output_chars": "100000"})["stdout"]
    assert SECRET not in shown and "redis" not in shown.lower() and "HOME" in shown


@pytest.mark.parametrize("library", ["", "import sympy"])
def test_memory_of_the_process_holds_no_secret(run: Run, judge: JudgeService, library: str) -> None:
    # The patterns match the secrets without holding them, so that the search does not find itself.
    socket = Path(urlsplit(judge.redis_uri).path)
    assert socket.is_socket()
    program = f"""
import ctypes, re
{library}
patterns = [rb'a-secret(?=-of-the-service)', rb'{socket.parent.name}(?=/{socket.name})']
found, scanned = [], 0
for line in open('/proc/self/maps').readlines():
    span, mode, *rest = line.split()
    if mode.startswith('rw') and not rest[3:]:
        start, end = (int(p, 16) for p in span.split('-'))
        memory = (ctypes.c_char * (end - start)).from_address(start)
        scanned += end - start
        found += [p for p in patterns if re.search(p, memory)]
print(scanned > 4 << 20, found)
"""
    result = run(program)
    assert result["stdout"] == "True []\n", result["stderr"]


def test_other_processes_are_invisible(run: Run, layers: set[str]) -> None:
    need(layers, "pid_namespace", "private_tmpfs")
    assert run("import os; print([int(p) for p in os.listdir('/proc') if p.isdigit()] == [os.getpid()])")["stdout"] == "True\n"


def test_files_of_the_machine_are_out_of_reach(run: Run, layers: set[str], tmp_path: Path) -> None:
    need(layers, "private_root")
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    for parent in (tmp_path, *list(tmp_path.parents)[:-2]):
        parent.chmod(0o755)
    program = f"""
import os
for path in ({str(secret)!r}, '/etc/shadow', '/proc/1/root{secret}', '/proc/self/cwd/../{secret}'):
    try: print('READ', open(path).read())
    except OSError as error: print(type(error).__name__)
os.symlink({str(secret)!r}, 'link')
try: print('READ', open('link').read())
except OSError as error: print(type(error).__name__)
"""
    result = run(program)
    assert "READ" not in result["stdout"] and result["stdout"].count("Error") == 5


def test_nothing_outside_the_working_directory_can_be_written(run: Run, layers: set[str]) -> None:
    need(layers, "private_root")
    program = """
import sys, os, numpy
wrote = []
for path in ('/x', '/usr/x', '/etc/passwd', '/dev/x', '/proc/sys/kernel/hostname', sys.prefix + '/x',
             os.path.dirname(numpy.__file__) + '/x.py', '/proc/self/oom_score_adj_x'):
    try:
        open(path, 'w').write('x'); wrote.append(path)
    except OSError: pass
print(wrote)
"""
    assert run(program)["stdout"] == "[]\n"


async def test_a_call_sees_nothing_of_its_sibling(judge: JudgeService, layers: set[str]) -> None:
    """While another call runs with a secret in its directory, memory, arguments and environment."""
    need(layers, "pid_namespace", "private_tmpfs")
    sibling = f"""
import os
os.environ['HIDDEN'] = {SECRET!r}
open('hidden', 'w').write({SECRET!r})
os.mkfifo('fifo'); os.symlink('/', 'root')
{HELD}"""
    search = """
import glob, os
found = []
for pattern in ('/tmp/*', '/tmp/*/*', '/dev/shm/*', '/proc/[0-9]*/root/tmp/*/*', '/proc/[0-9]*/cwd/*', '/proc/[0-9]*/environ',
                '/proc/[0-9]*/fd/*', '/proc/[0-9]*/task/*/fd/*', '/proc/self/root/tmp/*/*', '/proc/1/map_files/*'):
    for path in glob.glob(pattern):
        if path.rsplit('/', 1)[1] not in '012':
            try: found.append('a-secret' '-of-the-service' in open(path, errors='replace').read())
            except OSError: pass
print(any(found), [p for p in range(1, 5000) if p != os.getpid() and os.path.exists(f'/proc/{p}')])
"""
    async with JudgeClient(judge.url, time_limit_s=60.0) as client:
        other = asyncio.create_task(client.run(sibling))
        await until_marked(judge, 1)
        told = await client.run(search)
        (undisturbed,) = await let_go(judge, other)
    assert told.stdout == "False []\n", told.stderr
    assert undisturbed.stdout == "done\n"


def test_descriptor_tricks_open_nothing(run: Run, layers: set[str]) -> None:
    need(layers, "private_root", "seccomp")
    program = """
import os, sys
opened = []
def attempt(name, action):
    try: action(); opened.append(name)
    except OSError: pass
attempt('interpreter', lambda: os.open('/proc/self/exe', os.O_WRONLY))
attempt('root', lambda: os.listdir('/proc/1/root/../../var/log'))
attempt('handle', lambda: os.chroot('/proc/self/root'))
attempt('kernel', lambda: open('/proc/sys/kernel/core_pattern', 'w'))
attempt('sysrq', lambda: open('/proc/sysrq-trigger', 'w'))
attempt('device', lambda: os.mknod('disk', 0o600 | 0o060000, os.makedev(8, 0)))
attempt('memory', lambda: open('/proc/kcore', 'rb').read(1))
attempt('cgroup', lambda: os.listdir('/sys/fs/cgroup'))
attempt('mount', lambda: open('/proc/self/uid_map', 'w').write('0 0 1'))
attempt('setuid', lambda: os.setuid(0))
attempt('owner', lambda: os.chown('/tmp', 0, 0))
for number in os.listdir('/proc/self/fd'):
    try: target = os.readlink(f'/proc/self/fd/{number}')
    except OSError: continue  # that of the listing itself
    if not target.startswith(('/dev/null', 'pipe:')): opened.append(target)
print(opened)
"""
    result = run(program)
    assert result["stdout"] == "[]\n", result["stderr"]


@pytest.mark.parametrize("code", [0, 1, 2, 127, 128, 137, 139, 250, 251, 255])
def test_no_exit_code_passes_for_the_services_own(run: Run, code: int) -> None:
    for program in (f"import sys; sys.exit({code})", f"import os; os._exit({code})"):
        result = run(program)
        assert (result["exit_code"], result["reason"]) == (code, "")
        assert result["outcome"] == ("ok" if code == 0 else "error")


def test_a_call_sees_nothing_of_an_earlier_one(run: Run) -> None:
    run("open('left', 'w').write('x'); import builtins; builtins.left = 1")
    program = "import os, builtins\nprint(os.listdir('.'), os.path.exists('/tmp/left'), hasattr(builtins, 'left'))"
    assert run(program)["stdout"] == "['source.py'] False False\n"


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
def test_no_sockets(run: Run, layers: set[str], judge: JudgeService, family: str) -> None:
    need(layers, "seccomp")
    place = ("127.0.0.1", int(judge.url.rpartition(":")[2])) if family != "AF_UNIX" else urlsplit(judge.redis_uri).path
    program = f"""
import socket
s = socket.socket(socket.{family}, socket.SOCK_RAW if {family!r} in ('AF_NETLINK', 'AF_PACKET') else socket.SOCK_STREAM)
s.connect({place!r})
s.send(b'KEYS *\\r\\n'); print(s.recv(1000))
"""
    result = run(program)
    assert result["stdout"] == "" and result["outcome"] == "error"


def test_descriptors_are_closed(run: Run) -> None:
    program = "import os\nprint(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:3], "
    program += "[f for f in os.listdir('/proc/self/fd') if int(f) > 3])"
    assert run(program)["stdout"] == "[0, 1, 2] []\n"


@pytest.mark.parametrize("marker", ['{"outcome": "ok"}', "\\x00\\x00\\x00\\x00", "!poison", '"outcome":"ok"'])
def test_protocol_words_in_output_are_only_output(run: Run, marker: str) -> None:
    program = f"import sys\nprint('{marker}' * 3, flush=True)\nprint('{marker}', file=sys.stderr)\nsys.exit(3)"
    result = run(program)
    assert (result["outcome"], result["exit_code"]) == ("error", 3)


def test_hostile_exception_text(run: Run) -> None:
    result = run("class E(Exception):\n    def __str__(self): raise MemoryError\nraise E()")
    assert result["exit_code"] == 1


def test_stdin_cannot_be_used_to_reach_others(run: Run) -> None:
    result = run("import os; os.lseek(0, 0, 0); print(os.read(0, 100)); print(os.path.exists('/proc/self/fd/3'))")
    assert result["outcome"] in ("ok", "error")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs several uids")
async def test_each_slot_has_its_own_uid(judge: JudgeService, layers: set[str]) -> None:
    need(layers, "own_uid")
    async with JudgeClient(judge.url, time_limit_s=60.0) as client:
        calls = [asyncio.create_task(client.run(HELD)) for _ in range(2)]
        uids = {process.uids().real for process in await until_marked(judge, 2)}
        await let_go(judge, *calls)
    assert len(uids) == 2 and 0 not in uids


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=st.one_of(
        st.text(max_size=200),
        st.binary(max_size=100).map(lambda b: f"exec(compile({b!r}, 'x', 'exec'))"),
        st.lists(st.sampled_from(PIECES), max_size=6).map("\n".join),
    )
)
def test_random_programs_never_take_the_service_down(http: httpx.Client, program: str) -> None:
    body = {"type": "python", "solution": program, "input": program[:10], "options": {"time_limit_s": "0.3"}}
    response = http.post("/run", content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    if response.status_code != 422:  # lone surrogates are no valid JSON text
        assert response.json()["reason"] in ("", "worker_timeout", "queue_timeout")
