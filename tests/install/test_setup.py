"""Set-up's own decisions: prerequisites, the environment of compilers, a TransformerEngine that does not build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

SITE = "lib/python3.11/site-packages"


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`script` beside the functions of set-up, as setup_env.sh sources them."""
    sourced = 'set -euo pipefail; home=$(dirname "$venv"); log=$home/log te_log=$home/te.log again="" python=python3.11; '
    sourced += "for part in steps prerequisites gpu transformer_engine; do . scripts/install/$part.sh; done; "
    return subprocess.run(
        ["bash", "-c", sourced + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    return tmp_path / "venv"


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ('check_glibc 9.99 "sglang\'s wheels"', r"sglang's wheels need glibc 9.99 or newer, this system has "),
        ("check_disk 900000000", "the environment needs 900000 GB"),
        ("gcc() { :; }; PATH=/nowhere check_compilers", "gcc not found"),
        ("python=fake; fake() { echo /no/such/folder; }; check_compilers", "apt-get install python3.11-dev"),
        ("uname() { echo aarch64; }; check_gpu_prerequisites", "is made for x86_64, this machine is aarch64"),
    ],
)
def test_what_the_machine_lacks_is_named(venv: Path, check: str, message: str) -> None:
    done = bash(check.removeprefix("gcc() { :; }; "), venv=str(venv))
    assert done.returncode == 1 and message in done.stderr, done.stderr


def test_an_old_driver_is_a_warning(venv: Path) -> None:
    said = bash("nvidia-smi() { echo 535.104.05; }; check_driver; echo went on", venv=str(venv))
    assert "driver 535.104.05 is older than 580" in said.stderr and said.stdout == "went on\n"
    said = bash("nvidia-smi() { echo 580.65.06; }; check_driver", venv=str(venv))
    assert said.returncode == 0 and said.stderr == ""


def test_an_engine_that_does_not_build_leaves_the_rest(venv: Path) -> None:
    """The failure is told, what was half installed is taken out, and the next start does not build again."""
    (venv / "bin" / "python").write_text(f'#!/bin/sh\necho "$@" >> {venv}/calls\n')
    (venv / "bin" / "python").chmod(0o755)
    broken = 'build_te_wheel() { echo "error: no such header" >> "$te_log"; return 1; }; '
    run = "setup_transformer_engine; echo went on"
    done = bash(broken + run, venv=str(venv))
    assert done.returncode == 0 and done.stdout.endswith("went on\n")
    assert "error: no such header" in done.stderr and "--transformer-engine tries again" in done.stderr
    assert "megatron-core's local layers" in done.stderr
    calls = (venv / "calls").read_text()
    assert "pip uninstall -q -y transformer-engine transformer-engine-cu13 transformer-engine-torch" in calls
    tries = calls.count("pip install")
    again = bash(broken + run, venv=str(venv))
    assert "without TransformerEngine, whose build failed" in again.stdout and again.stderr == ""
    assert (venv / "calls").read_text().count("pip install") == tries
    # and when asked it does
    forced = bash(broken + "again=1; " + run, venv=str(venv))
    assert "error: no such header" in forced.stderr
    assert bash(run, venv=str(venv), RSTAR2_TRANSFORMER_ENGINE="0").stdout == "went on\n"


def test_a_kept_wheel_is_taken_and_not_built_again(venv: Path) -> None:
    """The folder is named after torch's build: a wheel for another one is not found."""
    (venv / "bin" / "python").write_text(
        f'#!/bin/sh\necho "$@" >> {venv}/calls\ncase "$2" in *torch.__version__*) echo 2.13.0+cu130;; esac\n'
    )
    (venv / "bin" / "python").chmod(0o755)
    folder = bash("te_wheel_folder", venv=str(venv), NVTE_CUDA_ARCHS="90;100").stdout.strip()
    assert folder.endswith("transformer-engine-torch-2.11.0-torch2.13.0+cu130-sm90_100")
    kept = Path(bash("te_wheel_folder", venv=str(venv), NVTE_CUDA_ARCHS="90").stdout.strip())
    kept.mkdir(parents=True)
    (kept / "build.json").write_text("{}")
    (kept / "transformer_engine_torch-2.11.0-x.whl").touch()
    built = "build_te_wheel() { echo built >&2; return 1; }; "
    done = bash(built + "setup_transformer_engine", venv=str(venv), NVTE_CUDA_ARCHS="90")
    assert done.returncode == 0 and "built" not in done.stderr, done.stderr
    assert f"--force-reinstall {kept}/transformer_engine_torch-2.11.0-x.whl" in (venv / "calls").read_text()
    assert (venv / ".rstar2-transformer-engine").read_text().startswith("installed ")


def test_compilers_are_on_the_path_of_a_gpu_environment_only(venv: Path) -> None:
    show = f'. scripts/install/gpu_environment.sh "{venv}"; echo "$PATH|${{CUDA_HOME:-}}|${{CPATH:-}}"'
    plain = bash(show, venv=str(venv), PATH="/usr/bin:/bin", CUDA_HOME="").stdout.strip().split("|")
    assert plain[:2] == ["/usr/bin:/bin", ""]
    home = venv / SITE / "nvidia" / "cu13"
    (home / "bin").mkdir(parents=True)
    path, cuda_home, cpath = bash(show, venv=str(venv), PATH="/usr/bin:/bin", CPATH="").stdout.strip().split("|")
    assert path == f"{venv}/bin:{home}/bin:/usr/bin:/bin" and cuda_home == str(home)
    assert str(venv / SITE / "nvidia/cudnn/include") in cpath
    other = bash(show, venv=str(venv), PATH="/usr/bin:/bin", RSTAR2_CUDA_HOME="/usr/local/cuda-13")
    assert "|/usr/local/cuda-13|" in other.stdout


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
    stamp = (Path(sys.prefix) / ".rstar2-installed").read_text()
    (venv / ".rstar2-installed").write_text(stamp)
    done = subprocess.run(
        ["bash", str(ROOT / launcher), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "RSTAR2_VENV": str(venv), "RSTAR2_GPU": "0"},
    )
    assert done.stdout.splitlines()[-1:] == [f"ran {python}"], done.stderr
