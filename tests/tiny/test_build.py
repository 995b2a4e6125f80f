from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rstar2_megatron.tiny.build import TinyPaths, build_tiny
from rstar2_megatron.tiny.recipe import TinyRecipe
from tests.tiny.small import AGENTLOOP, SMALL


def digests(paths: TinyPaths) -> dict[str, str]:
    files = sorted(path for path in paths.root.rglob("*") if path.is_file())
    return {str(f.relative_to(paths.root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def questions(path: Path) -> set[str]:
    return {json.loads(line)["prompt"][0]["content"] for line in path.read_text().splitlines()}


def test_training_and_heldout_problems_are_disjoint(built: TinyPaths) -> None:
    train, heldout = questions(built.train), questions(built.heldout)
    assert len(train) == SMALL.train_problems and len(heldout) == SMALL.heldout_problems
    assert train.isdisjoint(heldout)
    sft = built.conversations.read_text() + built.copy.read_text()
    assert not [question for question in heldout if question in sft]


def test_rows_have_the_schema_of_the_data_files(built: TinyPaths) -> None:
    rows = [json.loads(line) for path in (built.train, built.heldout) for line in path.read_text().splitlines()]
    assert len({row["query_id"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == {"prompt", "solutions", "query_id", "task"}
        assert row["prompt"][0]["role"] == "user" and int(row["solutions"][0]) is not None


def test_same_seed_gives_the_same_bytes(built: TinyPaths, tmp_path: Path) -> None:
    again = build_tiny(tmp_path, seed=0, agentloop=AGENTLOOP, recipe=SMALL, progress=lambda line: None)
    assert digests(again) == digests(built)
    assert again.root.name == built.root.name


def test_a_second_call_finds_the_first(built: TinyPaths) -> None:
    lines: list[str] = []
    before = built.root.stat().st_mtime_ns
    again = build_tiny(built.root.parent, seed=0, agentloop=AGENTLOOP, recipe=SMALL, progress=lines.append)
    assert again.root == built.root and not lines and built.root.stat().st_mtime_ns == before


class Begun(Exception):
    pass


def test_what_changes_the_data_is_another_build(built: TinyPaths) -> None:
    def begun(line: str) -> None:
        raise Begun(line)

    def root(seed: int = 0, **change: Any) -> Path:
        agentloop = AGENTLOOP.model_copy(update=change)
        return build_tiny(built.root.parent, seed, agentloop=agentloop, recipe=SMALL, progress=begun).root

    assert root(max_assistant_turns=7) == built.root
    with pytest.raises(Begun):
        root(seed=1)
    with pytest.raises(Begun):
        root(user_prefix="Problem: ")


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    lines: list[str] = []

    def fails(line: str) -> None:
        """The problems are written when the second part begins."""
        lines.append(line)
        if len(lines) == 2:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_tiny(tmp_path, seed=0, agentloop=AGENTLOOP, recipe=SMALL, progress=fails)
    assert not list(tmp_path.iterdir())


def test_yaml_and_recipe_agree() -> None:
    """The YAML's phases have rows enough."""
    config = yaml.safe_load((Path(__file__).parents[2] / "config" / "rstar2-tiny-cpu.yaml").read_text())
    rows = {"tiny:copy": TinyRecipe().copy.rows, "tiny:conversations": TinyRecipe().conversations}
    for phase in config["cold_start"]["phases"]:
        assert phase["steps"] * phase["batch_size"] == rows[phase["data_path"]]
        assert (phase.get("shuffle", True) is False) == (phase["name"] == "copy")
