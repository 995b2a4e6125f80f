"""Public benchmarks as our jsonl: AIME 2024 and 2025, HMMT February 2025, MATH-500, GPQA-Diamond.

A public data set whose columns have changed is an error that lists its columns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rstar2_megatron.data.json_text import BLANKS, exact_number
from rstar2_megatron.data.problems import problem_of
from rstar2_megatron.data.rows import DataError, HubName, file_rows, find_files, hub_rows, with_names

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Where a benchmark is on the Hugging Face hub, and how its rows are converted.

    `convert(row, seed)` gives the project's row without query_id. `key_column` names the problem in its query_id; a row
    without it has its number there.
    """

    path: str
    split: str
    num_problems: int
    columns: tuple[str, ...]
    convert: Callable[[Mapping[str, Any], int], Row]
    key_column: str
    config: str | None = None


def _math(row: Mapping[str, Any], seed: int) -> Row:
    return {"prompt": str(row["problem"]).strip(BLANKS), "solutions": [str(row["answer"]).strip(BLANKS)]}


_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_LETTERS = "ABCD"


def _multiple_choice(row: Mapping[str, Any], seed: int) -> Row:
    """The four answers in an order that depends on the seed and the question only; a solution is a letter of the right text."""
    question = str(row["Question"]).strip(BLANKS)
    choices = [str(row[column]).strip(BLANKS) for column in _CHOICES]
    order = list(range(len(choices)))
    random.Random(f"{seed}-{question}").shuffle(order)
    lines = "\n".join(f"({letter}) {choices[i]}" for letter, i in zip(_LETTERS, order))
    return {
        "prompt": f"{question}\n\n{lines}\n\nOne of the four is right. Answer with its letter.",
        "solutions": [letter for letter, i in zip(_LETTERS, order) if choices[i] == choices[0]],
    }


BENCHMARKS: dict[str, Benchmark] = {
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", 30, ("problem", "answer"), _math, "id"),
    "aime25": Benchmark("MathArena/aime_2025", "train", 30, ("problem", "answer"), _math, "problem_idx"),
    "hmmt25": Benchmark("MathArena/hmmt_feb_2025", "train", 30, ("problem", "answer"), _math, "problem_idx"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", 500, ("problem", "answer"), _math, "unique_id"),
    "gpqa-diamond": Benchmark(
        "Idavidrein/gpqa", "train", 198, ("Question", *_CHOICES), _multiple_choice, "Record ID", config="gpqa_diamond"
    ),
}


def convert(name: str, rows: Iterable[Mapping[str, Any]], seed: int = 0, source: str | Path | None = None) -> list[Row]:
    """Rows of a benchmark in the project's form. source: the file that they are from, if not from the hub.

    Raises DataError for a missing or empty column, a repeated row, or a text that training does not read.
    """
    benchmark = BENCHMARKS[name]
    converted: list[Row] = []
    seen: set[str] = set()
    for number, given in enumerate(rows, 1):
        where = f"{name}: row {number} of {source or benchmark.path}"
        row = with_names(dict(given), (*benchmark.columns, benchmark.key_column))
        missing = [column for column in benchmark.columns if not _says_something(row.get(column))]
        if missing:
            raise DataError(f"{where} has no text or number in {missing}; its columns are {sorted(given)}")
        key = row.get(benchmark.key_column)
        query_id = f"{name}-{number - 1 if key is None else key}"
        if query_id in seen:
            raise DataError(f"{where} repeats {query_id}")
        seen.add(query_id)
        converted.append({**benchmark.convert(row, seed), "query_id": query_id, "task": name})
        problem_of(converted[-1], where, "prompt", "solutions", query_id)
    return converted


def _says_something(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else exact_number(value)


def load(name: str, source: str | Path | None = None, seed: int = 0) -> list[Row]:
    """A benchmark from the hub, or from `source`: a file, or a directory that `datasets` reads.

    Raises DataError for an unknown name, a failed download, or a data set of another shape or size (a local source may
    be smaller).
    """
    if name not in BENCHMARKS:
        raise DataError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    rows = convert(name, _read(benchmark, source), seed, source)
    if not rows:
        raise DataError(f"{name}: {source or benchmark.path} has no rows")
    if source is None and len(rows) != benchmark.num_problems:
        raise DataError(
            f"{name}: {benchmark.path} has {len(rows)} problems now, {benchmark.num_problems} are expected; scores would "
            "not compare with published ones"
        )
    return rows


def _read(benchmark: Benchmark, source: str | Path | None) -> list[Row]:
    try:
        if source is not None and not Path(source).is_dir():
            return [row.values for file in find_files(str(source)) for row in file_rows(file)]
        config = benchmark.config if source is None else None
        return [row.values for row in hub_rows(HubName(str(source or benchmark.path), config, benchmark.split))]
    except DataError as error:
        remedy = (
            ". GPQA is gated: accept its terms on the hub and log in; without network download it elsewhere and give its "
            "directory with --source"
        )
        raise DataError(f"{source or benchmark.path} cannot be loaded: {error}{'' if source else remedy}") from error
