"""The rooms of the package: what imports what, and how large files and folders may be."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rstar2_megatron"
PURE = ("algorithm", "settings", "data", "report", "records", "model", "rollout/scheduling")
MAX_LINES = 400
MAX_FILES = 15


def imported(path: Path) -> Iterator[str]:
    """Every module or name that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses_torch_distributed(path: Path) -> bool:
    return any((name + ".").startswith("torch.distributed.") for name in imported(path))


def check_contracts(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project's Python files under another root, where something wrong can be planted."""
    for name in ("rstar2_megatron", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold(copy: Path) -> None:
    done = check_contracts(copy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "file, line, contract",
    [
        ("settings/placement.py", "from rstar2_megatron.training import gates", "Imports run down"),
        ("report/names.py", "from rstar2_megatron.evaluation import scores", "Imports run down"),
        ("judge/sandbox/cpp.py", "from rstar2_megatron.judge.server import app", "Imports run down inside the judge"),
        (
            "rollout/scheduling/admission_queue.py",
            "from rstar2_megatron.rollout import chat",
            "Imports run down inside rollout",
        ),
        (
            "actor/layout.py",
            "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from rstar2_megatron.actor import megatron_actor",
            "import each other",
        ),
        ("algorithm/kl.py", "def later():\n    import ray", "Pure rooms import no Ray"),
        ("runs/stages.py", "from rlinf.scheduler import Worker", "Only cluster imports RLinf"),
    ],
)
def test_a_planted_import_breaks_its_contract(copy: Path, file: str, line: str, contract: str) -> None:
    path = copy / "rstar2_megatron" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = check_contracts(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(contract in text for text in broken), done.stdout


def test_pure_rooms_do_not_import_torch_distributed(tmp_path: Path) -> None:
    """import-linter sees `torch` only, which some of them may import."""
    files = [path for room in PURE for path in (PACKAGE / room).rglob("*.py")]
    assert len(files) > 40
    assert [path for path in files if uses_torch_distributed(path)] == []
    for number, line in enumerate(("import torch.distributed as dist", "def f():\n    from torch import distributed")):
        planted = tmp_path / f"{number}.py"
        planted.write_text(line + "\n")
        assert uses_torch_distributed(planted)


def test_files_and_folders_stay_small() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [f"{path}: {lines} lines" for path, lines in sizes.items() if lines > MAX_LINES] == []
    for top in (PACKAGE, ROOT / "tests", ROOT / "benchmarks"):
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir())):
            files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(files) <= MAX_FILES, f"{folder} has {len(files)} Python files"
