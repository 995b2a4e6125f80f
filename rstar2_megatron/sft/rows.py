"""Tokenised rows of supervised fine-tuning, kept in flat arrays: 222 K conversations take under a gigabyte."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
from tqdm import tqdm

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.data.rows import DataError, data_input
from rstar2_megatron.rollout.chat import TURN_START
from rstar2_megatron.sft.format import Segments, row_segments

_ROWS_AT_ONCE = 256


class SFTRows:
    """Token ids and masks of all rows, in file order."""

    def __init__(self, ids: numpy.ndarray, mask: numpy.ndarray, ends: numpy.ndarray, skipped: int = 0) -> None:
        """ids, mask: [tokens of all rows]; ends: [rows], where each row ends; skipped: rows left out."""
        self._ids, self._mask, self._ends = ids, mask, ends
        self.skipped = skipped
        """Rows whose trained tokens are all beyond `max_length`."""

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> TrainSequence:
        tokens = slice(int(self._ends[row - 1]) if row else 0, int(self._ends[row]))
        ids = self._ids[tokens]
        return TrainSequence(ids, self._mask[tokens], numpy.zeros(len(ids), numpy.float32), advantage=0.0)

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def num_trained_tokens(self) -> int:
        return int(self._mask.sum())


def load_sft_rows(paths: Sequence[str | Path], tokenizer: Any, max_length: int) -> SFTRows:
    """Tokenise the jsonl rows of `paths` and cut each to `max_length` tokens.

    Segments are tokenised one by one, as a rollout's prompt and tool responses are. Raises DataError with file and
    line for a row that cannot be used.
    """
    ids, mask, ends = array("i"), array("B"), array("q")
    skipped = 0
    chatml = len(tokenizer([TURN_START], add_special_tokens=False)["input_ids"][0]) == 1
    for chunk in _chunks(paths, chatml):
        texts = [text for _, segments in chunk for text, _ in segments]
        pieces = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        for where, segments in chunk:
            row_ids: list[int] = []
            row_mask: list[int] = []
            for _, trained in segments:
                piece = next(pieces)
                row_ids += piece
                row_mask += [int(bool(trained))] * len(piece)
            if not any(row_mask) or len(row_ids) < 2:
                raise DataError(f"{where}: no token of this row is trained")
            row_mask[0] = 0  # nothing predicts the first token
            if not any(row_mask[:max_length]):
                skipped += 1
                continue
            ids.extend(row_ids[:max_length])
            mask.extend(row_mask[:max_length])
            ends.append(len(ids))
    if not ends:
        raise DataError(f"{', '.join(map(str, paths)) or '(no files)'}: no rows to train on ({skipped} too long)")
    return SFTRows(
        numpy.frombuffer(ids, dtype=numpy.int32),
        numpy.frombuffer(mask, dtype=numpy.uint8),
        numpy.frombuffer(ends, dtype=numpy.int64),
        skipped,
    )


def _chunks(paths: Sequence[str | Path], chatml: bool) -> Iterator[list[tuple[str, Segments]]]:
    """Rows of all files as (where, segments), some at a time."""
    for source in map(data_input, paths):
        bar = tqdm(source.rows(), f"tokenise {source.label[-40:]}", source.count(), leave=False, disable=None, unit="row")
        chunk: list[tuple[str, Segments]] = []
        for row in bar:
            try:
                chunk.append((row.where, row_segments(row.values)))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{row.where}: {error}") from None
            if not chatml and row.values.get("segments") is None:
                raise DataError(
                    f"{row.where}: messages are rendered in ChatML, and the tokenizer splits its {TURN_START}; give rows of "
                    "segments in the turns of the tokenizer's template"
                )
            if len(chunk) == _ROWS_AT_ONCE:
                yield chunk
                chunk = []
        yield chunk
