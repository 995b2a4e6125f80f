"""Tokenised rows of supervised fine-tuning: 5 bytes a token, so that 222 K conversations take about a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
from tqdm import tqdm

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.data.rows import DataError, check_media, data_input
from rstar2_megatron.rollout.chat import TURN_START, pattern_of, special_tokens
from rstar2_megatron.sft.format import Segments, row_segments

_ROWS_AT_ONCE = 256


class SFTRows:
    """Token ids and masks of all rows, in file order."""

    def __init__(self) -> None:
        self._rows: list[tuple[numpy.ndarray, numpy.ndarray]] = []
        self.skipped = 0
        """Rows left out because their trained tokens are all beyond `max_length`."""
        self.cut = 0
        """Rows of which the tokens up to `max_length` are kept."""

    def add(self, ids: list[int], mask: list[int]) -> None:
        self._rows.append((numpy.array(ids, numpy.int32), numpy.array(mask, numpy.uint8)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> TrainSequence:
        ids, mask = self._rows[row]
        return TrainSequence(ids, mask, numpy.zeros(len(ids), numpy.float32), advantage=0.0)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self._rows)

    @property
    def num_trained_tokens(self) -> int:
        return sum(int(mask.sum()) for _, mask in self._rows)


def load_sft_rows(paths: Sequence[str | Path], tokenizer: Any, max_length: int) -> SFTRows:
    """Tokenise the rows of `paths` and cut each to `max_length` tokens.

    Segments are tokenised one by one, as a rollout's prompt and tool responses are. Raises DataError with file and
    line for a row that cannot be used.
    """
    rows = SFTRows()
    chatml = len(tokenizer([TURN_START], add_special_tokens=False)["input_ids"][0]) == 1
    segmented = read_segments(paths, special_tokens(tokenizer), chatml)
    while chunk := list(islice(segmented, _ROWS_AT_ONCE)):
        texts = [text for _, segments in chunk for text, _ in segments]
        pieces = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        for where, segments in chunk:
            row_ids: list[int] = []
            row_mask: list[int] = []
            for _, trained in segments:
                piece = next(pieces)
                row_ids += piece
                row_mask += [trained] * len(piece)
            if not any(row_mask) or len(row_ids) < 2:
                raise DataError(f"{where}: no token of this row is trained")
            row_mask[0] = 0  # nothing predicts the first token
            if any(row_mask[:max_length]):
                rows.cut += len(row_ids) > max_length
                rows.add(row_ids[:max_length], row_mask[:max_length])
            else:
                rows.skipped += 1
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no rows to train on ({rows.skipped} too long)")
    return rows


def has_messages(paths: Sequence[str | Path]) -> bool:
    """Whether a file begins with a conversation, which is rendered here. Raises DataError for an unreadable one."""
    return any(row.values.get("segments") is None for path in paths for row in islice(data_input(path).rows(), 1))


def read_segments(
    paths: Sequence[str | Path], specials: Sequence[str] = (), chatml: bool = True
) -> Iterator[tuple[str, Segments]]:
    """(where, segments) of the rows of all files. Raises DataError, also for no rows.

    specials: control tokens of the tokenizer. chatml: its marks are tokens of the model.
    """
    pattern, where = pattern_of(specials), ""
    for source in map(data_input, paths):
        bar = tqdm(source.rows(), f"tokenise {source.label[-40:]}", leave=False, disable=None, unit="row")
        for row in bar:
            try:
                check_media(row.values)
                segments = row_segments(row.values, pattern)
            except (ValueError, TypeError, RecursionError) as error:
                raise DataError(f"{row.where}: {error}") from None
            if not chatml and row.values.get("segments") is None:
                raise DataError(
                    f"{row.where}: messages are rendered in ChatML, and the tokenizer splits its {TURN_START}; give rows of "
                    "segments in the turns of the tokenizer's template"
                )
            where = row.where
            yield where, segments
    if not where:
        raise DataError(f"{', '.join(map(str, paths)) or '(no files)'}: no rows to train on; give files that hold some")
