"""The blocks of docs/extend.md that install a part by itself, each in an environment of its own, from a copy of the project."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]
SECTION = (ROOT / "docs" / "extend.md").read_text().split("\n## Parts by themselves\n")[1]
BLOCKS = {block.split()[3]: block for block in re.findall(r"^```bash\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)
    return tmp_path


def run(part: str, clone: Path) -> str:
    """The output of a block, in which Python is this one, and without what this environment has installed."""
    block = BLOCKS[part].replace("python3", sys.executable)
    done = subprocess.run(
        ["bash", "-ec", block],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=1500,
        env={"PATH": "/usr/bin:/bin", "HOME": str(clone)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    installed = [
        clone / part / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / name
        for name in ("ray", "torch", "sglang")
    ]
    assert not any(path.exists() for path in installed)
    return done.stdout


def test_each_block_is_short() -> None:
    assert sorted(BLOCKS) == ["grade", "judge", "report"]
    assert all(len(block.splitlines()) <= 5 for block in BLOCKS.values())


def test_the_grader(clone: Path) -> None:
    assert run("grade", clone).splitlines()[-1] == "correct"


def test_curves(clone: Path) -> None:
    results = clone / "results" / "rstar2-tiny-cpu"
    results.mkdir(parents=True)
    rows = [{"step": step, "rollout/pass_rate": step / 9, "rollout/reward_scores": step / 9} for step in range(1, 9)]
    (results / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("report", clone)
    assert (results / "curves.png").stat().st_size > 10_000


def test_the_judge(clone: Path) -> None:
    said = run("judge", clone)
    assert json.loads(said[said.rindex("{") :])["stdout"].strip() == "42"


def test_the_graders_versions_are_those_of_a_whole_run() -> None:
    lines = (ROOT / "requirements" / "grade.txt").read_text().splitlines()
    whole = "".join((ROOT / "requirements" / name).read_text() for name in ("base.txt", "programs.txt"))
    assert [line for line in lines if "==" in line and line not in whole.splitlines()] == []
