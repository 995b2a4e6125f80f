"""README's commands as a stranger meets them: no wheels of this machine, a clone below /tmp, each Python that is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.install.test_gpu_lock import uv

HOUR_S = 3600
pytestmark = [pytest.mark.release, pytest.mark.timeout(3 * HOUR_S)]


def interpreter(version: str) -> str:
    """Of the system, of uv or of pyenv. Skips where the machine has none."""
    found = subprocess.run([uv(), "python", "find", "--system", version], capture_output=True, text=True).stdout.strip()
    for place in (
        Path(found),
        *Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"),
    ):
        if place.is_file():
            return str(place)
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_set_up_main_job_and_default_tier(version: str) -> None:
    python = interpreter(version)
    # what sends pip to this machine's folders; the certificate and a mirror are anybody's
    own = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "UV_FIND_LINKS", "UV_INDEX", "RSTAR2_VENV", "VIRTUAL_ENV")
    own += ("PYTHONPATH", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "UV_PYTHON": python, "RSTAR2_GPU": "0"}
    place = Path(tempfile.mkdtemp(prefix=f"rstar2-{version}-", dir="/tmp"))
    try:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(place / "rstar2")], check=True)
        for command in ("run_rstar2.sh runner.max_steps=5", "run_tests.sh"):
            with (place / "output").open("w") as output:
                done = subprocess.run(
                    ["bash", *command.split()],
                    cwd=place / "rstar2",
                    env=environment,
                    stdout=output,
                    stderr=output,
                    timeout=HOUR_S,
                )
            assert done.returncode == 0, (place / "output").read_text()[-8000:]
        made = subprocess.run([place / "rstar2/.venv/bin/python", "--version"], capture_output=True, text=True)
        assert made.stdout.startswith(f"Python {version}.")
    finally:
        shutil.rmtree(place)
