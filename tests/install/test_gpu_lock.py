"""requirements/gpu.lock is what a resolver makes of the pins; what both environments share has one version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

REQUIREMENTS = ROOT / "requirements"
UNREACHABLE = ("Failed to fetch", "dns error", "Connection refused", "error sending request", "Could not connect")


def pins(path: Path) -> dict[str, str]:
    """{normalised name: version} of the lines name==version."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files that the resolver reads, to be changed."""
    shutil.copytree(REQUIREMENTS, tmp_path / "requirements")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "lock_gpu.sh", tmp_path / "scripts")
    return tmp_path


def uv() -> str:
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    assert found, "uv is among the packages for tests: bash scripts/setup_env.sh --dev"
    return found


def lock(project: Path, python: str = "3.11") -> subprocess.CompletedProcess[str]:
    """Lock again, as `python` would have it. Metadata only."""
    return resolve(["bash", "scripts/lock_gpu.sh"], project, UV=uv(), PYTHON_VERSION=python)


def resolve(command: list[str], project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Skips where no registry answers: the tests run offline too."""
    done = subprocess.run(
        command,
        cwd=project,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "1", **environment},
    )
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"no package registry answers: {done.stderr.strip().splitlines()[-1]}")
    return done


@pytest.mark.ci
def test_the_lock_resolves_to_itself(project: Path) -> None:
    done = lock(project)
    assert done.returncode == 0, f"requirements/gpu.in no longer resolves:\n{done.stderr}"
    again = (project / "requirements" / "gpu.lock").read_text()
    assert again == (REQUIREMENTS / "gpu.lock").read_text(), "run bash scripts/lock_gpu.sh and look at its diff"


@pytest.mark.ci
@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_one_lock_serves_every_python(project: Path, python: str) -> None:
    """Another Python would lock the same versions; only what an older one's standard library lacks may fall away."""
    assert lock(project, python).returncode == 0
    here, there = pins(REQUIREMENTS / "gpu.lock"), pins(project / "requirements" / "gpu.lock")
    assert there.items() <= here.items() and here.keys() - there.keys() == {"async-timeout"}


@pytest.mark.ci
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_pins_of_a_cpu_are_complete_for_every_python(project: Path, python: str) -> None:
    """Nothing is left to the day's newest version: what set-up resolves has a pin, also of torch's CUDA build."""
    files = ["base.txt", "dev.txt", "-c", "constraints.txt", "-c", "gpu.lock", "--python-version", python, "--quiet"]
    done = resolve([uv(), "pip", "compile", *files, "--output-file", "cpu.lock"], project / "requirements")
    assert done.returncode == 0, done.stderr
    pinned = pins(REQUIREMENTS / "gpu.lock") | pins(REQUIREMENTS / "constraints.txt")
    assert pins(project / "requirements" / "cpu.lock").items() <= pinned.items()


@pytest.mark.ci
def test_pins_that_contradict_each_other_are_seen(project: Path) -> None:
    constraints = project / "requirements" / "constraints.txt"
    kept = constraints.read_text()
    constraints.write_text(re.sub(r"^sentencepiece==.*$", "sentencepiece==0.2.0", kept, flags=re.MULTILINE))
    done = lock(project)
    assert done.returncode != 0 and "sentencepiece" in done.stderr
    # one that resolves, to another lock
    constraints.write_text(re.sub(r"^Pygments==.*$", "Pygments==2.19.1", kept, flags=re.MULTILINE))
    done = lock(project)
    assert done.returncode == 0, done.stderr
    assert pins(project / "requirements" / "gpu.lock")["pygments"] == "2.19.1"


def test_what_both_environments_have_has_one_version() -> None:
    locked = pins(REQUIREMENTS / "gpu.lock")
    for name in ("constraints.txt", "no-deps.txt", "loggers.txt"):
        own = pins(REQUIREMENTS / name)
        different = {x: (own[x], locked[x]) for x in own.keys() & locked.keys() if own[x] != locked[x]}
        assert different == {}, f"{name} against gpu.lock"
    assert locked["torch"] == pins(REQUIREMENTS / "constraints.txt")["torch"] and "sglang" in locked


def test_what_is_not_in_the_lock_is_installed_as_it_was_resolved() -> None:
    """TransformerEngine and cuda-tile have files of their own, resolved with the rest."""
    locked, wanted = pins(REQUIREMENTS / "gpu.lock"), pins(REQUIREMENTS / "gpu.in")
    engine, tile = pins(REQUIREMENTS / "transformer-engine.txt"), pins(REQUIREMENTS / "cuda-tile.txt")
    assert {x: wanted[x] for x in ("transformer-engine", "transformer-engine-cu13")}.items() <= engine.items()
    assert len(set(engine.values())) == 1 and "transformer-engine-torch" in engine
    assert wanted["cuda-tile"] == tile["cuda-tile"]
    assert not (engine.keys() | tile.keys()) & locked.keys()
    assert "transformer-engine-cu12" not in locked  # the CUDA 12 core beside torch for CUDA 13


def test_there_is_one_cudnn_and_one_nccl() -> None:
    """Those that torch was built with; the image brings none (tests/docker). Two of them would mix sub-libraries."""
    locked = pins(REQUIREMENTS / "gpu.lock")
    for library in ("cudnn", "nccl"):
        found = [name for name in locked if name.startswith(f"nvidia-{library}") and "frontend" not in name]
        assert found == [f"nvidia-{library}-cu13"]


def test_compiler_and_headers_are_of_one_toolkit() -> None:
    """flashinfer's kernels do not compile with an nvcc newer than the runtime's headers (CCCL refuses)."""
    locked = pins(REQUIREMENTS / "gpu.lock")
    series = {name: locked[f"nvidia-cuda-{name}"].split(".")[:2] for name in ("nvcc", "crt", "runtime", "nvrtc", "cccl")}
    series["nvvm"] = locked["nvidia-nvvm"].split(".")[:2]
    assert set(map(tuple, series.values())) == {tuple(locked["cuda-toolkit"].split(".")[:2])}, series
