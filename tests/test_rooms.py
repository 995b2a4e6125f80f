"""What `lint-imports` would say of imports that break a contract, and the one contract that it cannot see."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.imports import imports

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

# Contract, a room that gets a file `planted`, and what that file must not import.
PLANTED = [
    ("Imports run down", "rstar2_megatron.settings", "rstar2_megatron.training"),
    ("Imports run down", "rstar2_megatron.report", "rstar2_megatron.evaluation"),
    ("Imports run down inside the judge", "rstar2_megatron.judge.sandbox", "rstar2_megatron.judge.server"),
    ("Imports run down inside rollout", "rstar2_megatron.rollout.scheduling", "rstar2_megatron.rollout.chat"),
    ("Pure rooms import no Ray, SGLang, megatron-core, RLinf", "rstar2_megatron.algorithm", "ray"),
    ("Only cluster imports RLinf", "rstar2_megatron.runs", "rlinf"),
]
CYCLES = "No two files, and no two rooms, import each other"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each contract, of a copy of the project's Python files with every planted import."""
    copy = tmp_path_factory.mktemp("planted")
    for name in ("rstar2_megatron", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    in_files = [(f"{room}.planted", imported) for _, room, imported in PLANTED]
    in_files += [("benchmarks.one", "benchmarks.other"), ("benchmarks.other", "benchmarks.one")]
    for module, imported in in_files:
        path = copy.joinpath(*module.split(".")).with_suffix(".py")
        path.write_text(f"def later():\n    import {imported}\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    headings = "|".join(re.escape(contract["name"]) for contract in CONTRACTS)
    _, *parts = re.split(rf"^({headings})\n-+$", done.stdout, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize(("contract", "room", "imported"), PLANTED)
def test_a_planted_import_breaks_its_contract(broken: dict[str, str], contract: str, room: str, imported: str) -> None:
    assert f"{room}.planted -> {imported} (" in broken[contract]


def test_two_files_that_import_each_other_break_theirs(broken: dict[str, str]) -> None:
    assert "No cycles are allowed in benchmarks." in broken[CYCLES]


def test_every_contract_has_a_planted_import() -> None:
    assert {contract["name"] for contract in CONTRACTS} == {CYCLES, *(contract for contract, _, _ in PLANTED)}


def uses_torch_distributed(path: Path) -> bool:
    return any((name + ".").startswith("torch.distributed.") for name in imports(path))


def test_pure_rooms_do_not_import_torch_distributed(tmp_path: Path) -> None:
    """import-linter sees `torch` only, which some of them may import."""
    (pure,) = [contract["source_modules"] for contract in CONTRACTS if contract["name"].startswith("Pure rooms")]
    places = [ROOT.joinpath(*module.split(".")) for module in pure]
    files = [path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")])]
    assert len(files) > 40
    assert [path for path in files if uses_torch_distributed(path)] == []
    for number, line in enumerate(("import torch.distributed as dist", "def f():\n    from torch import distributed")):
        planted = tmp_path / f"{number}.py"
        planted.write_text(line + "\n")
        assert uses_torch_distributed(planted)
