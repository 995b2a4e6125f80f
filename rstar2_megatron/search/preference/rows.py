"""Comparisons in token ids, read from the tree files of searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rstar2_megatron.algorithm.preference import Comparison
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.search.preference.pairs import NodePairs, pairs_of, without_idle
from rstar2_megatron.search.preference.trees import read_trees
from rstar2_megatron.search.tree import Node, Tree
from rstar2_megatron.settings.schema import PreferenceSettings


@dataclass(slots=True)
class PreferenceRows:
    """Comparisons in the order of the files, and what was found on the way."""

    comparisons: list[Comparison] = field(default_factory=list)
    trees: int = 0
    too_long: int = 0
    """Pairs that were left out, because a prefix exceeds `max_length`."""

    @property
    def num_pairs(self) -> int:
        return sum(len(comparison.pairs) for comparison in self.comparisons)

    @property
    def num_tokens(self) -> int:
        return sum(sum(comparison.lengths) for comparison in self.comparisons)

    @property
    def largest(self) -> int:
        """Most tokens of the prefixes of one comparison."""
        return max((sum(comparison.lengths) for comparison in self.comparisons), default=0)


def load_preference_rows(
    paths: Sequence[str | Path], tokenizer: Any, settings: PreferenceSettings, max_length: int
) -> PreferenceRows:
    """The comparisons of all trees of `paths`. Raises DataError with file and line for a tree that cannot be used."""
    rows, checked = PreferenceRows(), set[Path]()
    for path, where, row, tree in read_trees(paths):
        rows.trees += 1
        if path not in checked and _check_vocabulary(tree, row["prompt_ids"], tokenizer, where):
            checked.add(path)
        for found in pairs_of(tree, settings):
            comparison, dropped = comparison_of(row["prompt_ids"], found, max_length)
            rows.too_long += dropped
            if comparison is not None:
                rows.comparisons.append(comparison)
    if not rows.comparisons:
        raise DataError(
            f"{', '.join(map(str, paths)) or '(no files)'}: no pair to train on in {rows.trees} trees ({rows.too_long} pairs "
            "are too long); search more problems that have right and wrong solutions, or lower preference.min_margin or "
            "preference.min_distance"
        )
    return rows


def _check_vocabulary(tree: Tree, prompt_ids: Sequence[int], tokenizer: Any, where: str) -> bool:
    """Whether there was a step to check. Raises DataError when the tokenizer reads its tokens as another text."""
    step = next((node.step for node in tree.root.walk() if node.step is not None), None)
    if step is None:
        return False
    # A prompt has only the tokenizer's ids. A policy has rows beyond them (padding), which are sampled now and then, and
    # which decode to nothing.
    ids = [token for token in step.ids[step.mask.astype(bool)].tolist() if token < len(tokenizer)]
    if max(prompt_ids) >= len(tokenizer) or not tokenizer.decode(ids).startswith(step.text):
        raise DataError(
            f"{where}: its token ids are of another vocabulary than the model's: train from a model with the tokenizer of the "
            "policy that searched"
        )
    return True


def comparison_of(prompt_ids: Sequence[int], found: NodePairs, max_length: int) -> tuple[Comparison | None, int]:
    """(the comparison in token ids without pairs that are too long, the number of these); None when no pair is left."""
    nodes = [*found.better, *found.worse]
    parents = {node.parent.tag for node in nodes if node.parent is not None}
    depth = nodes[0].depth - 1 if len(parents) == 1 else 0  # siblings share their parent's steps
    shared = np.array(prompt_ids, np.int32)
    shared = np.concatenate([shared, *(step.ids for step in nodes[0].steps[:depth])]).astype(np.int32)

    def own(node: Node) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int32), *(step.ids for step in node.steps[depth:])]).astype(np.int32)

    def fits(node: Node) -> bool:
        return len(shared) + len(own(node)) <= max_length

    kept = [(i, j) for i, j in found.pairs if fits(found.better[i]) and fits(found.worse[j])]
    dropped = len(found.pairs) - len(kept)
    if not kept:
        return None, dropped
    left = without_idle(found.better, found.worse, kept)
    pairs = [(i, len(left.better) + j) for i, j in left.pairs]
    return Comparison(shared, [own(node) for node in (*left.better, *left.worse)], pairs), dropped
