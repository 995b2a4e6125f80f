"""Wherever the environment lies and whatever the machine refuses: calls find the interpreter and its packages, and are held."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rstar2_megatron
from rstar2_megatron.judge.sandbox import isolation, linux
from tests.judge.conftest import Run

# Runs programs in one slot; tells their results, after each the number of the sandbox's processes, and the isolation.
SLOT = """
import asyncio, json, psutil, sys
from rstar2_megatron.judge.limits import CallLimits
from rstar2_megatron.judge.worker.slots import SandboxFailed, SlotPool

async def main():
    pool, told = SlotPool(1), {"results": [], "processes": [], "is_full": True}
    await pool.start(120)
    await pool.check_isolation("partial")
    slot = await pool.free.get()
    limits = CallLimits(time_limit_s=1.0)._asdict()
    for program in sys.argv[1:]:
        job = {"type": "python", "solution": program, "input": "", "limits": limits, "sub_id": "x"}
        told["results"].append(json.loads(await slot.run(json.dumps(job).encode(), 60.0)))
        told["processes"].append(len(psutil.Process().children(recursive=True)))
    told |= pool.description["isolation"]
    try:
        await pool.check_isolation("full")
    except SandboxFailed as error:
        told["is_full"] = str(error)
    await pool.stop()
    print(json.dumps(told))

asyncio.run(main())
"""
ORDINARY_USER = ["unshare", "-U", "--map-user=1000", "--map-group=1000"]
# Starts Python so that the kernel refuses it the system calls that are named first, as a container's filter does.
REFUSING = """
import errno, os, sys
from rstar2_megatron.judge.sandbox import linux, seccomp
linux.no_new_privileges()
rules = [seccomp.Rule(name, 0x50000 | errno.EPERM) for name in sys.argv[1].split()]
linux.do([seccomp.install_step(seccomp.compile_filter(0x7FFF0000, rules))])
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
WITHOUT_NAMESPACES = [sys.executable, "-c", REFUSING, "mount unshare setns"]
needs_user_namespaces = pytest.mark.skipif(
    subprocess.run([*ORDINARY_USER, "true"], capture_output=True).returncode != 0,
    reason="no user namespaces here, which stand in for an ordinary user",
)


def run_in_slot(python: Sequence[str | Path], *programs: str) -> dict[str, Any]:
    ended = subprocess.run([*python, "-c", SLOT, *programs], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


@pytest.mark.parametrize("place", ["/tmp", pytest.param("/dev/shm", marks=pytest.mark.ci), "behind links"])
def test_calls_see_the_interpreter_wherever_it_lies_and_nothing_in_their_directory(place: str) -> None:
    """Each call's own tmpfs covers /tmp and /dev/shm. A link to a directory leads nowhere where only its target is mounted."""
    is_linked = place == "behind links"
    with tempfile.TemporaryDirectory(dir=None if is_linked else place) as name:
        os.chmod(name, 0o755)  # calls have a uid of their own
        directory = Path(name)
        environment = directory / "venv"
        venv.create(environment, symlinks=True)
        python = environment / "bin" / "python"
        if is_linked:
            (directory / "base").symlink_to(sys.base_prefix)
            (directory / "link").symlink_to(environment)
            described = environment / "pyvenv.cfg"
            lines = [line for line in described.read_text().splitlines() if not line.startswith("home = ")]
            described.write_text("\n".join([f"home = {directory}/base/bin", *lines]))
            python = directory / "link" / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        (packages / "networkx.py").write_text("WORD = 'seen'\n")  # a name of the list: no other would be found
        ours = [entry for entry in sys.path if entry.endswith("site-packages")]
        ours.append(str(Path(rstar2_megatron.__file__).parents[1]))
        (packages / "ours.pth").write_text("\n".join(ours))
        imports = "import cmath, numpy, networkx\nprint(networkx.WORD, numpy.arange(3).sum())\nopen(networkx.__file__, 'a')"
        told = run_in_slot([python], "import os; os.listdir('.')", imports, "open('/tmp/x', 'w').write('kept')")
    empty, imported, written = told["results"]
    assert empty["stdout"] == "['source.py']\n", empty
    assert imported["stdout"] == "seen 3\n", imported
    assert "Read-only file system" in imported["stderr"] or "Permission denied" in imported["stderr"]
    assert written["outcome"] == "ok", written


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to enter a chroot")
def test_a_call_in_a_chroot_sees_nothing_outside_of_it(tmp_path: Path) -> None:
    """A root of its own leads outside there, because a return to a mount namespace is one to the namespace's root."""
    enter = 'mount --make-rprivate / && mount --rbind / "$0" && mount -t tmpfs none /mnt && touch /mnt/outside'
    enter += ' && exec chroot "$0" "$@"'
    told = run_in_slot(
        ["unshare", "-m", "sh", "-c", enter, tmp_path, sys.executable], "import os\nprint(os.path.exists('/mnt/outside'))"
    )
    assert "chroot" in told["missing"]["private_root"] and told["level"] == "partial"
    assert told["results"][0]["stdout"] == "False\n", told["results"][0]["stderr"]


@pytest.mark.ci
def test_where_namespaces_and_mounts_are_refused_calls_run_all_the_same() -> None:
    """As in a container with its engine's usual filter."""
    endless = "import os, time\nif os.fork() == 0:\n    os.setsid()\nelse:\n    print('there', flush=True)\ntime.sleep(60)"
    small = "import os\nprint('small', os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR'], os.listdir())"
    told = run_in_slot(WITHOUT_NAMESPACES, small, "import numpy\nprint('library')", endless, "print('after')")
    assert {"pid_namespace", "network_namespace", "private_tmpfs"} <= set(told["missing"])
    results = [(result["outcome"], result["stdout"], result["stderr"]) for result in told["results"]]
    expected = [("ok", "small True ['source.py']\n"), ("ok", "library\n"), ("timeout", "there\n"), ("ok", "after\n")]
    assert results == [(*result, "") for result in expected]
    assert len(set(told["processes"])) == 1  # nothing of the third call, whose child has left its process group


def test_a_call_inherits_no_more_modules_than_it_needs(run: Run) -> None:
    """Each call copies what its parent has mapped. An `import asyncio` somewhere would cost all of them a tenth more."""
    heavy = "asyncio ssl logging shutil subprocess redis orjson pydantic datetime statistics zlib site dataclasses inspect"
    # A program that names numpy would get another parent.
    result = run(f"import sys; sorted(sys.modules.keys() & {{*{heavy.split()}, 'num' + 'py'}})")
    assert result["stdout"] == "[]\n", result["stderr"]


@needs_user_namespaces
def test_an_ordinary_user_gets_user_namespaces_and_is_told_what_is_missing() -> None:
    told = run_in_slot([*ORDINARY_USER, sys.executable], "import os; os.getpid() > 1, os.listdir('.')")
    assert told["level"] == "partial" and "own_uid" in told["missing"]
    assert {"pid_namespace", "private_tmpfs", "seccomp"} <= set(told["active"])
    assert told["results"][0]["stdout"] == "(True, ['source.py'])\n"
    assert "own_uid" in told["is_full"]  # the refusal where full isolation is required


@needs_user_namespaces
@pytest.mark.ci
def test_without_namespaces_an_ordinary_user_has_landlock(tmp_path: Path) -> None:
    """Programs, the judge and Redis have the same uid: one call ended them all and read the programs of earlier calls."""
    with contextlib.suppress(OSError):
        if linux.landlock_version() < linux.LANDLOCK_SCOPE_VERSION:
            pytest.skip("needs landlock's scope of signals")
    (tmp_path / "dump.rdb").write_text("programs of earlier calls")
    attack = f"""
import os, signal
for attempt in (lambda: os.kill(os.getppid(), 0), lambda: os.kill({os.getpid()}, 0), lambda: os.listdir({str(tmp_path)!r}),
                lambda: os.listdir('/'), lambda: open({str(tmp_path)!r} + '/dump.rdb').read(),
                lambda: open(f'/proc/{{os.getppid()}}/cmdline').read()):
    try: print('DONE', attempt())
    except PermissionError: print('refused')
pid = os.fork()
if pid == 0: signal.pause()
os.kill(pid, 9); print(os.waitpid(pid, 0)[1], open('/proc/self/comm').read() != '', __import__('cmath').pi > 3)
open('own', 'w').write('x'); print(open('own').read())
"""
    (result,) = run_in_slot([*ORDINARY_USER, *WITHOUT_NAMESPACES], attack)["results"]
    assert result["stdout"].split() == ["refused"] * 6 + ["9", "True", "True", "x"], result


@needs_user_namespaces
@pytest.mark.ci
def test_minimal_isolation_is_asked_for_by_name() -> None:
    judge = ["-m", "rstar2_megatron.judge", "all", "--workers", "1", "--sessions", "0"]
    refusing = [*WITHOUT_NAMESPACES[:-1], f"{WITHOUT_NAMESPACES[-1]} landlock_create_ruleset"]
    command = [*ORDINARY_USER, *refusing, *judge]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert refused.returncode == 1 and "JUDGE_REQUIRE_ISOLATION=minimal" in refused.stderr, refused.stderr
    asked = {**os.environ, "JUDGE_REQUIRE_ISOLATION": "minimal"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=asked) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("judge ready")
        finally:
            process.terminate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has several uids")
@pytest.mark.parametrize("mapped", [4_294_967_295, 65_536])
def test_workers_of_a_node_share_no_uid(mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where namespaces are refused it is the uid that keeps calls apart."""
    monkeypatch.setattr(Path, "read_text", lambda path: f"0 0 {mapped}\n")
    for slots in (3, 2056):
        taken: list[range] = []
        for number in range(4):
            monkeypatch.setattr(os, "getpid", lambda number=number: 4_000 + number)
            layers = isolation.IsolationLayers()
            isolation.choose_uids(layers, slots + number % 2)  # a node's workers have a slot more or less
            assert layers.uids and layers.uids.stop <= mapped and len(layers.uids) == slots + number % 2
            assert not any(set(layers.uids) & set(other) for other in taken)
            taken.append(layers.uids)
