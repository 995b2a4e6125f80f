"""Wherever the environment lies, calls find the interpreter and its packages."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

import rstar2_megatron
from rstar2_megatron.judge.sandbox import linux
from rstar2_megatron.services.redis_server import find_redis_server


def test_an_environment_behind_a_link_starts_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "venv").symlink_to(sys.prefix)
    program = (
        "import asyncio\n"
        "from rstar2_megatron.judge.worker.slots import SlotPool\n"
        "async def main():\n"
        "    pool = SlotPool(1)\n"
        "    await pool.start(60)\n"
        "    await pool.stop()\n"
        "asyncio.run(main())\n"
    )
    python = tmp_path / "venv" / "bin" / "python"
    ended = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_an_environment_under_tmp_is_seen_by_calls() -> None:
    """Each call's own /tmp covers it: a clone of the project under /tmp would lose its packages there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)  # calls have a uid of their own
        environment = Path(directory) / "venv"
        venv.create(environment, symlinks=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        (packages / "only_here.py").write_text("WORD = 'seen'\n")
        ours = [entry for entry in sys.path if entry.endswith("site-packages")]
        ours.append(str(Path(rstar2_megatron.__file__).parents[1]))
        (packages / "ours.pth").write_text("\n".join(ours))
        program = (
            "import asyncio, sys\n"
            "from rstar2_megatron.judge.client.client import JudgeClient\n"
            "from rstar2_megatron.judge.client.service import JudgeService\n"
            "attempt = 'import only_here, os\\nprint(only_here.WORD)\\nopen(only_here.__file__, chr(97))'\n"
            "async def main(url):\n"
            "    async with JudgeClient(url) as client:\n"
            "        result = await client.run(attempt)\n"
            "    print(result.stdout, result.stderr)\n"
            "with JudgeService(workers=1) as service:\n"
            "    asyncio.run(main(service.url))\n"
        )
        python = environment / "bin" / "python"
        (python.parent / "redis-server").symlink_to(find_redis_server())
        ended = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout.startswith("seen\n"), ended.stdout + ended.stderr
    assert "Read-only file system" in ended.stdout or "Permission denied" in ended.stdout


def test_where_namespaces_and_mounts_are_refused_calls_run_all_the_same() -> None:
    """As in a container with its engine's usual filter."""
    program = """
import asyncio, json, psutil
from rstar2_megatron.judge.sandbox import linux, seccomp
from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.worker.slots import SlotPool

linux.no_new_privileges()
refused = [seccomp.Rule(name, 0x50001) for name in ("mount", "unshare", "setns")]
linux.do([seccomp.install_step(seccomp.compile_filter(0x7FFF0000, refused))])

async def main():
    pool = SlotPool(1)
    await pool.start(60)
    await pool.check_isolation("partial")  # root: own uids
    print(json.dumps(sorted(pool.description["isolation"]["missing"])))
    slot = await pool.free.get()
    endless = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\nprint('there', flush=True)\\ntime.sleep(60)"
    for solution in ("print('small')", "import numpy\\nprint('library')", endless, "print('after')"):
        limits = CallLimits(time_limit_s=2.0)._asdict()
        job = {"type": "python", "solution": solution, "input": "", "limits": limits, "sub_id": "x"}
        result = json.loads(await slot.run(json.dumps(job).encode(), 30.0))
        print(result["outcome"], *result["stdout"].split()[:1], result["stderr"])
    # launcher, two zygotes, the slot, its call parents; nothing of the third call, whose child has left its session
    print(len(psutil.Process().children(recursive=True)))
    await pool.stop()

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    missing, *results, processes = ended.stdout.splitlines()
    assert {"pid_namespace", "network_namespace", "private_tmpfs"} <= set(json.loads(missing)), ended.stderr
    assert [line.strip() for line in results] == ["ok small", "ok library", "timeout there", "ok after"], results
    assert processes == "6"


def test_what_calls_are_forked_from_is_small() -> None:
    """Each call copies what its parent has mapped. An `import asyncio` somewhere would cost all of them a tenth more."""
    program = (
        "import sys\n"
        f"sys.path[:] = {sys.path}\n"
        "from rstar2_megatron.judge.sandbox.zygote import import_standard_library\n"
        "import_standard_library()\n"
        "heavy = {'asyncio', 'ssl', 'logging', 'shutil', 'subprocess', 'numpy', 'redis', 'orjson', 'pydantic'}\n"
        "heavy |= {'datetime', 'statistics', 'zlib', 'site', 'dataclasses', 'inspect', 'platform'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    ended = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[]\n", ended.stdout + ended.stderr


ORDINARY_USER = [*["unshare", "-U", "--map-user=1000", "--map-group=1000"], sys.executable, "-c"]
WITHOUT_NAMESPACES = """
import errno, os, sys
from rstar2_megatron.judge.sandbox import linux, seccomp
refused = ["mount", "unshare", "setns", *sys.argv[1].split()]
linux.no_new_privileges()
rules = [seccomp.Rule(name, 0x50000 | errno.EPERM) for name in refused]
linux.do([seccomp.install_step(seccomp.compile_filter(0x7FFF0000, rules))])
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
needs_user_namespaces = pytest.mark.skipif(
    subprocess.run([*ORDINARY_USER[:4], "true"], capture_output=True).returncode != 0,
    reason="no user namespaces here, which stand in for an ordinary user",
)


@needs_user_namespaces
def test_without_namespaces_an_ordinary_user_has_landlock(tmp_path: Path) -> None:
    """Programs, the judge and Redis have the same uid: one call ended them all and read the programs of earlier calls."""
    with contextlib.suppress(OSError):
        if linux.landlock_version() < linux.LANDLOCK_SCOPE_VERSION:
            pytest.skip("needs landlock's scope of signals")
    (tmp_path / "dump.rdb").write_text("programs of earlier calls")
    program = """
import asyncio, json, os, sys
from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.worker.slots import SlotPool
attack = f'''
import os, signal
for attempt in (lambda: os.kill({os.getpid()}, 0), lambda: os.listdir({sys.argv[1]!r}), lambda: os.listdir('/'),
                lambda: open({sys.argv[1]!r} + '/dump.rdb').read(), lambda: open('/proc/{os.getpid()}/cmdline').read()):
    try: print('DONE', attempt())
    except PermissionError: print('refused')
pid = os.fork()
if pid == 0: signal.pause()
os.kill(pid, 9); print(os.waitpid(pid, 0)[1], open('/proc/self/comm').read() != '', __import__('cmath').pi > 3)
open('own', 'w').write('x'); print(open('own').read())
'''
async def main():
    pool = SlotPool(1)
    await pool.start(60)
    await pool.check_isolation("partial")
    slot = await pool.free.get()
    job = {"type": "python", "solution": attack, "input": "", "limits": CallLimits()._asdict(), "sub_id": "x"}
    result = json.loads(await slot.run(json.dumps(job).encode(), 30.0))
    print(result["stdout"], result["stderr"])
    await pool.stop()
asyncio.run(main())
"""
    command = [*ORDINARY_USER, WITHOUT_NAMESPACES, "", "-c", program, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["refused"] * 5 + ["9", "True", "True", "x"], ended.stdout + ended.stderr


@needs_user_namespaces
def test_minimal_isolation_is_asked_for_by_name() -> None:
    judge = ["-m", "rstar2_megatron.judge", "all", "--workers", "1", "--sessions", "0"]
    command = [*ORDINARY_USER, WITHOUT_NAMESPACES, "landlock_create_ruleset", *judge]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "JUDGE_REQUIRE_ISOLATION=minimal" in refused.stderr, refused.stderr
    asked = {**os.environ, "JUDGE_REQUIRE_ISOLATION": "minimal"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=asked) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("judge ready")
        finally:
            process.terminate()
