"""The version that a check's file, a package, a citation and the changelog name is one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from rstar2_megatron import __version__

ROOT = Path(__file__).parents[1]


def test_every_place_names_one_version_and_the_changelog_its_day() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert {__version__, package, citation["version"], newest[1]} == {__version__}
    assert newest[2] == citation["date-released"]
