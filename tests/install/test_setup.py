"""Set-up's own decisions: prerequisites, uv, torch's build, compilers, a TransformerEngine that does not build."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.install.test_gpu_lock import REQUIREMENTS, pins, uv

SITE = "lib/python3.12/site-packages"
NOWHERE = "http://127.0.0.1:9/simple"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here; Debian: apt-get install build-essential")


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`script` beside the functions of set-up, as setup_env.sh sources them."""
    sourced = 'set -euo pipefail; home=$(dirname "$venv"); log=$home/log te_log=$home/te.log again="" gpu=${gpu:-}; '
    sourced += "for part in steps prerequisites gpu transformer_engine; do . scripts/install/$part.sh; done; "
    unset = ("UV_", "PIP_", "RSTAR2_TORCH_INDEX")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return subprocess.run(
        ["bash", "-c", sourced + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**inherited, "uv": uv(), "PIP_CONFIG_FILE": os.devnull, **environment},
    )


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    return tmp_path / "venv"


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ('check_glibc 9.99 "sglang\'s wheels"', r"sglang's wheels need glibc 9.99 or newer, this system has "),
        ("needed_mb=900000000 check_disk", "the environment needs 900000 GB"),
        ("PATH=/nowhere check_compilers", "gcc not found"),
        pytest.param("check_compilers", "apt-get install python3-dev, or UV_MANAGED_PYTHON=1", marks=needs_gcc),
        ("uname() { echo aarch64; }; check_system", "are made for x86_64, this machine is aarch64"),
    ],
)
def test_what_the_machine_lacks_is_named(venv: Path, check: str, message: str) -> None:
    program(venv / "bin" / "python", "echo /no/such/folder")
    done = bash(check, venv=str(venv))
    assert done.returncode == 1 and message in done.stderr, done.stderr


@needs_gcc
def test_an_old_driver_is_refused_before_a_download_unless_cuda_compat_bridges_it(venv: Path, tmp_path: Path) -> None:
    check = "nvidia-smi() { echo $answer; }; gpu=1 check_system; echo went on"
    old = bash(check, venv=str(venv), answer="550.54.15")
    assert old.returncode == 1 and "driver 550.54.15 is older than 580" in old.stderr and old.stdout == ""
    assert "apt-get install cuda-compat-13-0" in old.stderr and "Nothing was downloaded" in old.stderr
    assert bash(check, venv=str(venv), answer="580.65.06").stdout == "went on\n"
    for version, status in ((12040, 1), (13000, 0)):
        code = f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(tmp_path / "libcuda.so.1"), "-"]
        subprocess.run(command, input=code, text=True, check=True)
        assert bash(check, venv=str(venv), answer="550.54.15", LD_LIBRARY_PATH=str(tmp_path)).returncode == status


def test_uv_is_the_systems_or_comes_by_pip_into_a_folder_of_its_own(venv: Path, tmp_path: Path) -> None:
    pinned = pins(REQUIREMENTS / "constraints.txt")["uv"]
    find = f'PATH="{tmp_path}/bin:$PATH"; find_uv; echo "$uv"'
    program(tmp_path / "bin" / "uv", "echo uv 0.9.2 '(linux)'")
    assert bash(find, venv=str(venv)).stdout == f"{tmp_path}/bin/uv\n"
    program(tmp_path / "bin" / "uv", "echo uv 0.4.1")  # too old
    program(tmp_path / "bin" / "python3", f"echo $@ >> {tmp_path}/calls")
    said = bash(find, venv=str(venv)).stdout
    assert said.endswith(f"{tmp_path}/.cache/uv/bin/uv\n") and f"installing uv=={pinned} into {tmp_path}/.cache/uv" in said
    assert f"--target {tmp_path}/.cache/uv uv=={pinned}" in (tmp_path / "calls").read_text()
    # there already
    program(tmp_path / ".cache" / "uv" / "bin" / "uv", f"echo uv {pinned}")
    assert bash(find, venv=str(venv)).stdout == f"{tmp_path}/.cache/uv/bin/uv\n"
    # neither pip nor venv
    shutil.rmtree(tmp_path / ".cache")
    program(tmp_path / "bin" / "python3", "echo No module named pip >&2; exit 1")
    done = bash(find, venv=str(venv))
    assert done.returncode == 1 and "No module named pip" in done.stderr and "apt-get install python3-venv" in done.stderr


def test_what_pip_is_told_of_indexes_is_told_uv(venv: Path, tmp_path: Path) -> None:
    if (ROOT / ".cache/uv/bin/python").exists():  # the pip of set-up, where the system has none
        (tmp_path / ".cache").mkdir()
        (tmp_path / ".cache/uv").symlink_to(ROOT / ".cache/uv")
    elif subprocess.run(["python3", "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("no pip here")
    show = 'use_pip_settings; echo "$UV_DEFAULT_INDEX|$UV_INDEX|$UV_INDEX_STRATEGY|$UV_FIND_LINKS"'
    told = {"PIP_INDEX_URL": "https://mirror/simple", "PIP_EXTRA_INDEX_URL": "https://a https://b", "PIP_FIND_LINKS": "/x /y"}
    assert bash(show, venv=str(venv), **told).stdout == "https://mirror/simple|https://a https://b|unsafe-best-match|/x,/y\n"
    own = bash(show, venv=str(venv), UV_DEFAULT_INDEX="https://own", **told)
    assert own.stdout.startswith("https://own|")
    plain = bash('use_pip_settings; echo "${UV_DEFAULT_INDEX-unset}${UV_INDEX-unset}"', venv=str(venv))
    assert plain.stdout == "unsetunset\n", plain.stderr


def test_a_python_that_does_not_fit_is_refused_with_the_remedy(venv: Path, tmp_path: Path) -> None:
    nothing = {"UV_PYTHON_DOWNLOADS": "never", "UV_PYTHON_INSTALL_DIR": str(tmp_path / "pythons")}
    none = bash("make_venv", venv=str(venv), UV_PYTHON_PREFERENCE="only-managed", **nothing)
    assert none.returncode == 1 and "Python 3.11, 3.12 or 3.13 is needed" in none.stderr
    assert "apt-get install python3 (Debian 12, 13, Ubuntu 24.04)" in none.stderr
    for version in ("3.10.13", "3.14.0"):
        fake = program(
            tmp_path / "uv",
            f"mkdir -p $2/bin; printf '#!/bin/sh\\necho Python {version}\\n' > $2/bin/python; chmod +x $2/bin/python",
        )
        done = bash("make_venv", venv=str(venv), uv=str(fake))
        assert done.returncode == 1 and f"UV_PYTHON names Python {version}; Python 3.11, 3.12 or 3.13 is needed" in done.stderr
        assert not venv.exists()


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """A server with PyTorch's index of CPU builds at /cpu and an ordinary one at /simple."""
    for name, version in (("cpu", "2.13.0+cpu"), ("simple", "2.13.0")):
        folder = tmp_path / "served" / name / "torch"
        folder.mkdir(parents=True)
        wheel = f"torch-{version}-py3-none-any.whl"
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(folder / wheel, "w") as file:
            file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        (folder / "index.html").write_text(f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_cpu_build_comes_from_its_index_and_else_the_cuda_build(venv: Path, tmp_path: Path, indexes: str) -> None:
    """Said, and the disk is asked for what will come."""
    (venv / "bin").rmdir()
    subprocess.run([uv(), "venv", "--quiet", "--no-project", "--python", sys.executable, "--clear", str(venv)], check=True)
    choose = 'choose_torch; echo "$needed_mb"'
    install = choose + '; uv_pip -q --no-deps "${torch_from[@]}" "$torch_pin"; "$uv" pip list -q --python "$venv/bin/python"'
    places = {"venv": str(venv), "UV_CACHE_DIR": str(tmp_path / "cache"), "UV_DEFAULT_INDEX": f"{indexes}/simple"}
    cuda = bash(choose, **places, RSTAR2_TORCH_INDEX=NOWHERE)
    assert f"no torch==2.13.0 from {NOWHERE}" in cuda.stdout and "the CUDA build, 4 GB larger" in cuda.stdout, cuda.stderr
    assert cuda.stdout.splitlines()[-1] == "7500"
    cpu = bash(install, **places, RSTAR2_TORCH_INDEX=f"{indexes}/cpu")
    assert cpu.stdout.splitlines()[:2] == ["setup: torch is the CPU build", "3000"], cpu.stdout + cpu.stderr
    assert "2.13.0+cpu" in cpu.stdout
    # the same pin on a machine that got its GPU later: the CUDA build takes its place
    later = bash(install, **places, gpu="1")
    assert later.stdout.splitlines()[0] == "20000", later.stderr
    assert "+cpu" not in later.stdout
    wheels = tmp_path / "served" / "cpu" / "torch"
    refused = bash(choose, **places, gpu="1", UV_FIND_LINKS=str(wheels))
    assert refused.returncode == 1 and "gives a build of torch==2.13.0 without CUDA" in refused.stderr
    nothing = bash(choose, **places | {"UV_DEFAULT_INDEX": NOWHERE, "UV_HTTP_RETRIES": "0"}, gpu="1", UV_NO_CACHE="1")
    assert nothing.returncode == 1 and "no package index gives torch==2.13.0" in nothing.stderr, nothing.stdout


def test_an_engine_that_does_not_build_leaves_the_rest(venv: Path, tmp_path: Path) -> None:
    """The failure is told, what was half installed is taken out, and the next start does not build again."""
    program(venv / "bin" / "python", "echo 2.13.0+cu130")
    uv = str(program(tmp_path / "uv", f'echo "$@" >> {tmp_path}/calls'))
    broken = 'build_te_wheel() { echo "error: no such header" >> "$te_log"; echo built >> "$home/builds"; return 1; }; '
    run = "setup_transformer_engine; echo went on"
    done = bash(broken + run, venv=str(venv), uv=uv)
    assert done.returncode == 0 and done.stdout.endswith("went on\n")
    assert "error: no such header" in done.stderr and "--transformer-engine tries again" in done.stderr
    assert "megatron-core's local layers" in done.stderr
    removed = "transformer-engine transformer-engine-cu13 transformer-engine-torch"
    assert (tmp_path / "calls").read_text() == f"pip uninstall -q --python {venv}/bin/python {removed}\n"
    again = bash(broken + run, venv=str(venv), uv=uv)
    assert "without TransformerEngine, whose build failed" in again.stdout and again.stderr == ""
    assert (tmp_path / "builds").read_text() == "built\n"
    # and when asked it does
    forced = bash(broken + "again=1; " + run, venv=str(venv), uv=uv)
    assert "error: no such header" in forced.stderr
    assert bash(run, venv=str(venv), RSTAR2_TRANSFORMER_ENGINE="0").stdout == "went on\n"


def test_a_kept_wheel_is_taken_and_not_built_again(venv: Path, tmp_path: Path) -> None:
    """The folder is named after torch's build: a wheel for another one is not found."""
    program(venv / "bin" / "python", 'case "$2" in *torch.__version__*) echo 2.13.0+cu130;; esac')
    uv = str(program(tmp_path / "uv", f'echo "$@" >> {tmp_path}/calls'))
    folder = bash("te_wheel_folder", venv=str(venv), NVTE_CUDA_ARCHS="90;100").stdout.strip()
    assert folder.endswith("transformer-engine-torch-2.11.0-torch2.13.0+cu130-sm90_100")
    kept = Path(bash("te_wheel_folder", venv=str(venv), NVTE_CUDA_ARCHS="90").stdout.strip())
    kept.mkdir(parents=True)
    (kept / "build.json").write_text("{}")
    (kept / "transformer_engine_torch-2.11.0-x.whl").touch()
    built = "build_te_wheel() { echo built >&2; return 1; }; "
    done = bash(built + "setup_transformer_engine", venv=str(venv), uv=uv, NVTE_CUDA_ARCHS="90")
    assert done.returncode == 0 and "built" not in done.stderr, done.stderr
    # core, front and extension in one step: a run that starts meanwhile finds none or all
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith(f"-r {venv}/.rstar2-te-core.txt {kept}/transformer_engine_torch-2.11.0-x.whl")
    assert (venv / ".rstar2-transformer-engine").read_text().startswith("installed ")


def test_a_build_says_how_far_it_is(venv: Path) -> None:
    """On the log of a real build: a line of each of its 28 files, and all of it in the log."""
    log = gzip.decompress((ROOT / "benchmarks/results/gpu_install_te_build.log.gz").read_bytes()).decode()
    (venv.parent / "said").write_text(log)
    done = bash('exec 8>&2; te_progress < "$home/said"', venv=str(venv))
    assert done.stdout == log
    lines = done.stderr.splitlines()
    assert len(lines) == 28 and lines[13].startswith("setup: TransformerEngine: 14 of 28 files, about ")


def test_compilers_are_on_the_path_of_a_gpu_environment_only(venv: Path) -> None:
    show = f'. scripts/install/gpu_environment.sh "{venv}"; echo "$PATH|${{CUDA_HOME:-}}|${{CPATH:-}}"'
    home = venv / SITE / "nvidia" / "cu13"
    (home / "lib").mkdir(parents=True)  # torch's CUDA build brings libraries without a compiler
    plain = bash(show, venv=str(venv), PATH="/usr/bin:/bin", CUDA_HOME="").stdout.strip().split("|")
    assert plain[:2] == ["/usr/bin:/bin", ""]
    program(home / "bin" / "nvcc", "")
    path, cuda_home, cpath = bash(show, venv=str(venv), PATH="/usr/bin:/bin", CPATH="").stdout.strip().split("|")
    assert path == f"{venv}/bin:{home}/bin:/usr/bin:/bin" and cuda_home == str(home)
    assert str(venv / SITE / "nvidia/cudnn/include") in cpath
    other = bash(show, venv=str(venv), PATH="/usr/bin:/bin", RSTAR2_CUDA_HOME="/usr/local/cuda-13")
    assert "|/usr/local/cuda-13|" in other.stdout


@needs_gcc
def test_the_wheels_toolkit_gets_what_a_linker_looks_for(venv: Path) -> None:
    """lib64, names without versions and a libcuda to link against: with them a program links as against a full toolkit."""
    lib = venv / SITE / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    make = (
        'gcc -shared -fPIC -Wl,-soname,libcudart.so.13 -x c -o "$lib/libcudart.so.13" - <<< "int cudaFree(void*p){return 0;}"; '
    )
    assert bash(make + "complete_toolkit && complete_toolkit", venv=str(venv), lib=str(lib)).returncode == 0
    link = (
        'gcc -shared -fPIC -x c -o "$lib/probe.so" - '
        '-L"$lib/../lib64" -L"$lib/../lib64/stubs" -Wl,--no-as-needed -lcudart -lcuda '
        '<<< "int cudaFree(void*); int probe(void){return cudaFree(0);}"; readelf -d "$lib/probe.so"'
    )
    linked = bash(link, venv=str(venv), lib=str(lib))
    assert "libcudart.so.13" in linked.stdout and "libcuda.so.1" in linked.stdout, linked.stderr


@pytest.mark.parametrize("launcher", ["run_rstar2.sh", "examples/agent/rstar2/compare_with_verl.sh"])
def test_the_launcher_uses_the_environment_that_set_up_made(venv: Path, tmp_path: Path, launcher: str) -> None:
    """RSTAR2_VENV names both, as the message of a full disk advises."""
    if (Path(sys.prefix) / ".rstar2-gpu").exists():
        pytest.skip("an environment with GPU packages: set-up would want TransformerEngine in the other one too")
    python = venv / "bin" / "python"
    python.write_text('#!/bin/sh\necho "ran $0"\n')
    python.chmod(0o755)
    shutil.copy(Path(sys.prefix) / ".rstar2-checkout", venv)
    done = subprocess.run(
        ["bash", str(ROOT / launcher), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "RSTAR2_VENV": str(venv), "RSTAR2_GPU": "0"},
    )
    assert done.stdout.splitlines()[-1:] == [f"ran {python}"], done.stderr


def test_an_environment_follows_the_checkout_that_uses_it(venv: Path, tmp_path: Path) -> None:
    """After a clone has moved, and where two share one by RSTAR2_VENV: else the other's code runs, or none is found."""
    if (Path(sys.prefix) / ".rstar2-gpu").exists():
        pytest.skip("an environment with GPU packages: set-up would want TransformerEngine in the other one too")
    program(venv / "bin" / "python", "true")
    program(tmp_path / "bin" / "uv", f'[ "$1" = --version ] && exec {uv()} --version; echo "$@" >> {tmp_path}/asked')
    shutil.copy(Path(sys.prefix) / ".rstar2-installed", venv)
    want = (venv / ".rstar2-installed").read_text().strip()

    def set_up() -> list[str]:
        environment = {
            **os.environ,
            "RSTAR2_VENV": str(venv),
            "RSTAR2_GPU": "0",
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", str(ROOT / "scripts/setup_env.sh")], capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == 0, done.stderr
        asked = tmp_path / "asked"
        lines = asked.read_text().splitlines() if asked.exists() else []
        asked.unlink(missing_ok=True)
        return lines

    (venv / ".rstar2-checkout").write_text(f"{want} /another/checkout\n")
    (asked,) = set_up()
    assert asked.startswith("pip install") and asked.endswith("-e .")
    assert (venv / ".rstar2-checkout").read_text() == f"{want} {ROOT}\n"
    assert set_up() == []
