"""The trees that comparisons are made from: those of MCTS, whose steps have a Q. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.search.tree import Tree
from rstar2_megatron.search.tree_file import TreeFile, tree_of


def read_trees(paths: Sequence[str | Path]) -> Iterator[tuple[Path, str, dict[str, Any], Tree]]:
    """(file, place, row, tree) of each tree. Raises DataError with file and line for one that has no steps to compare."""
    for path in map(Path, paths):
        if not path.is_file():
            raise DataError(f"tree file {path} does not exist; python -m rstar2_megatron.search writes such files")
        for number, row in TreeFile(path, {}).rows():
            where = f"{path}:{number}"
            try:
                tree = tree_of(row)
            except ValueError as error:
                raise DataError(f"{where}: {' '.join(str(error).split())[:200]}") from None
            if (mode := row.get("mode")) != "mcts":
                raise DataError(f"{where}: a tree of {mode}; only trees of MCTS have the Q of steps")
            yield path, where, row, tree
