"""Comparisons in token ids from tree files, and the files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.search.preference.rows import load_preference_rows
from rstar2_megatron.settings.schema import PreferenceSettings
from tests.rollout.tiny import make_model
from tests.search.written_trees import PROMPT, write_trees

SETTINGS = PreferenceSettings(min_distance=1)


def test_prefixes_are_the_searchs_tokens(tokenizer: Any, tmp_path: Path) -> None:
    rows = load_preference_rows([write_trees(tmp_path / "mcts.jsonl", tokenizer)], tokenizer, SETTINGS, 200)
    assert rows.trees == 4 and rows.too_long == 0 and rows.num_pairs == sum(len(c.pairs) for c in rows.comparisons)
    first, second, *_ = rows.comparisons
    opening = f"<|im_start|>user\n{PROMPT}"
    assert [tokenizer.decode(s.input_ids) for s in first.sequences()] == [
        f"{opening}a good way: add them<|im_end|>",
        f"{opening}a bad way: guess the number<|im_end|>",
    ]
    assert first.pairs == [(0, 1)]
    # the second step of the good way: its right answers (one text) against its wrong one
    assert tokenizer.decode(second.shared) == f"{opening}a good way: add them<|im_end|>"
    right, wrong = (tokenizer.decode(own) for own in second.continuations)
    assert right == "the result is 17<|im_end|>" and wrong.startswith("the result is ")
    whole = next(c for c in rows.comparisons if tokenizer.decode(c.shared) == opening and len(c.pairs) > 1)
    assert {tokenizer.decode(whole.continuations[j]).split("<")[0] for _, j in whole.pairs} == {"a bad way: guess the number"}
    assert rows.largest == max(sum(c.lengths) for c in rows.comparisons)
    assert rows.num_tokens == sum(s.length for c in rows.comparisons for s in c.sequences())


def test_long_prefixes_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    path = write_trees(tmp_path / "mcts.jsonl", tokenizer)
    rows = load_preference_rows([path], tokenizer, SETTINGS, 200)
    longest = max(max(c.lengths) for c in rows.comparisons)
    fewer = load_preference_rows([path], tokenizer, SETTINGS, longest - 1)
    assert fewer.too_long > 0 and fewer.num_pairs + fewer.too_long == rows.num_pairs
    assert max(max(c.lengths) for c in fewer.comparisons) < longest
    with pytest.raises(DataError, match=r"no pair to train on in 4 trees \(\d+ pairs are too long\)"):
        load_preference_rows([path], tokenizer, SETTINGS, 8)


@pytest.mark.parametrize(
    ("row", "message"),
    [({"mode": "beam"}, "mcts.jsonl:1: a tree of beam; only trees of MCTS"), ({"nodes": [{}]}, "mcts.jsonl:1: not a tree")],
)
def test_other_trees_are_refused(tokenizer: Any, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write_trees(tmp_path / "mcts.jsonl", tokenizer, 1, **row)
    with pytest.raises(DataError, match=message):
        load_preference_rows([path], tokenizer, SETTINGS, 200)


def test_tokens_of_another_vocabulary_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = write_trees(tmp_path / "mcts.jsonl", tokenizer)
    other = make_model(tmp_path / "other", vocab_size=512, words=260)
    with pytest.raises(DataError, match=r"mcts.jsonl:1: its token ids are of another vocabulary"):
        load_preference_rows([path], AutoTokenizer.from_pretrained(other), SETTINGS, 200)
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist"):
        load_preference_rows([tmp_path / "absent.jsonl"], tokenizer, SETTINGS, 200)


def test_a_token_that_only_the_model_has_is_no_other_vocabulary(tokenizer: Any, tmp_path: Path) -> None:
    """Models have rows beyond their tokenizer; a policy at a high temperature samples one, and it decodes to nothing."""
    path = write_trees(tmp_path / "mcts.jsonl", tokenizer, stray=len(tokenizer) + 3)
    rows = load_preference_rows([path], tokenizer, SETTINGS, 200)
    assert rows.trees == 4 and len(tokenizer) + 3 in rows.comparisons[0].continuations[0]


def test_continuations_begin_where_the_shared_tokens_end(tokenizer: Any, tmp_path: Path) -> None:
    rows = load_preference_rows([write_trees(tmp_path / "mcts.jsonl", tokenizer)], tokenizer, SETTINGS, 200)
    for comparison in rows.comparisons:
        assert all(len(own) and own.dtype == np.int32 for own in comparison.continuations)
        assert {i for pair in comparison.pairs for i in pair} == set(range(len(comparison.continuations)))
