"""A stranger pastes the ```bash blocks of README.md and docs/8xh100.md, one after the other, into a shell in a clone.

Two things are put in place of what this machine lacks: a run for GPUs or of minutes is planned (`--dry-run`), and what the hub
would send comes from files. The rest of a block runs as it is written. tests/release and test_check.py run the laptop's
commands to their end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

PAGES = ("README.md", "docs/8xh100.md")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def here(block: str, files: Path) -> str:
    """The block as this machine can run it."""
    text = block.replace("\\\n", " ")
    # The hub: its client has the options that the block gives it, and the problems are those of a file.
    text = re.sub(r"\.venv/bin/hf download \S+ (--\S+) \S+", r".venv/bin/hf download --help | grep -q -- \1", text)
    text = text.replace("--source dapo", f"--source dapo={files / 'dapo.jsonl'}")
    text = re.sub(r"--benchmarks aime24( \w+)*", f"--benchmarks math500 --source {files / 'math500.jsonl'}", text)
    return re.sub(r"^(bash run_rstar2\.sh\b(?:(?!--dry-run|--check|#).)*).*", r"\1 --dry-run", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is tracked or will be, with this environment as `.venv`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    clone = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    (clone / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".rstar2-checkout":
            (clone / ".venv" / path.name).symlink_to(path)
    stamp = (Path(sys.prefix) / ".rstar2-installed").read_text().strip()
    (clone / ".venv" / ".rstar2-checkout").write_text(
        f"{stamp} {clone}\n"
    )  # else set-up would make the environment the clone's
    return clone


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many rows as the hub has of a benchmark, and enough problems of DAPO's form for a step and a validation set."""
    directory = tmp_path_factory.mktemp("hub")
    rows = [{"prompt": f"How many pages have {n} books of {n + 7} pages?", "solution": str(n * (n + 7))} for n in range(2, 502)]
    benchmark = [{"problem": f"Find {n} squared.", "answer": str(n * n), "unique_id": f"a/{n}"} for n in range(500)]
    for name, content in (("dapo", rows), ("math500", benchmark)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return directory


@pytest.mark.ci
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_a_stranger_pastes_the_blocks(page: str, clone: Path, files: Path, tmp_path: Path) -> None:
    found = blocks(page)
    assert len(found) >= 3
    environment = {**os.environ, "PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("RSTAR2_VENV", "RAY_ADDRESS"):
        environment.pop(name, None)
    script = "\n".join(["set -e", *(here(block, files) for block in found)])
    done = subprocess.run(
        ["bash"], input=script, cwd=clone, env=environment, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("\nfits\n") >= len(re.findall(r"^bash run_rstar2", script, re.MULTILINE)), done.stdout[-3000:]
    if "process_train_dataset" in script:
        (data,) = re.findall(r"train_data_paths=\[(\S+?)\]", script)
        assert len((clone / data).read_text().splitlines()) >= 128
        assert "data.train_data_paths" not in done.stderr, done.stderr[-3000:]  # what the block makes is what the run reads


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_in_a_block_that_is_run(page: str) -> None:
    """The other blocks are output."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    others = [block for language, block in fenced if language != "bash"]
    assert not [block for block in others if re.search(r"^(bash|python|\.venv|\$)", block, re.MULTILINE)]
