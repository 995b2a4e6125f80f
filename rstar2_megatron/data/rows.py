"""Rows of a data set, one at a time: from jsonl, json, parquet or csv files, from directories of `datasets`, or from the hub.

Every row comes with the place it was read from, so that an error can name file and row.
"""

from __future__ import annotations

import codecs
import csv
import glob
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rstar2_megatron.data.json_text import json_fault, load_json

_TABLES = (".csv", ".tsv")
SUFFIXES = (".jsonl", ".json", ".parquet", *_TABLES)
HUB = "hf:"
"""Begins the name of a set on the hub: `hf:OWNER/NAME[:CONFIG][:SPLIT][@REVISION]`."""
_BATCH_ROWS = 1024  # of parquet decoded at a time
_PARQUET = b"PAR1"
BESIDE = ("options", "choices", "image", "images")
"""Columns without which a problem may not be whole."""
_MEDIA = re.compile(r"(?:image|video|audio)s?(?:_\d+)?")
_NOTHING = re.compile(r"""['"]\w+['"]\s*:|\b(?:None|null|nan)\b|[\[\]{}'",\s]""")  # of an empty value as text
_UNREAD = (".gz", ".bz2", ".xz", ".zst", ".zip", ".arrow", ".feather", ".xlsx", ".pkl")
"""Kinds of data that are not read, and so not passed over beside what is."""
_OF_CONVERSATIONS = ("messages", "tools")
"""Columns whose objects have other keys in each row."""
_FOREIGN: dict[str, bytes | tuple[bytes, ...]] = {  # what a file with these first bytes is, and what to do
    "a gzip file; unpack it by gunzip": b"\x1f\x8b",
    "a bzip2 file; unpack it by bunzip2": b"BZh",
    "an xz file; unpack it by unxz": b"\xfd7zXZ",
    "a zstd file; unpack it by unzstd": b"\x28\xb5\x2f\xfd",
    "a zip or xlsx file; unpack it, or export the table as csv": b"PK\x03\x04",
    "an Arrow file; give the directory that datasets saved, or write it as parquet": (b"ARROW1", b"\xff\xff\xff\xff"),
    "UTF-16; convert it: iconv -f UTF-16 -t UTF-8": (b"\xff\xfe", b"\xfe\xff"),
    "a pickle, which is not read; write the rows as jsonl or parquet": b"\x80\x04",
    "a pointer of Git LFS and no data; git lfs pull in its directory fetches them": b"version https://git-lfs",
}


class DataError(ValueError):
    """A data file is missing, empty, or has a bad row; the message names file and line."""


class Absent(DataError):
    """A file is not on this machine, or the hub cannot be reached."""


class Unusable(ValueError):
    """A well-formed row that cannot be trained on; a report counts the message as the reason."""


def check_media(values: Mapping[str, Any]) -> None:
    """Raises Unusable for a row with pictures and the like."""
    for name, value in values.items():
        there = _MEDIA.fullmatch(name) and not isinstance(value, int | float) and _NOTHING.sub("", str(value)[:1000])
        if there and not (name == "video" and there.startswith("http")):  # where the problem came from
            raise Unusable(f"the row has {name}, which no model here reads; leave out what asks about them")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its place: `file:line`, or `file row n` (from 1) of a parquet file or the hub."""

    where: str
    values: dict[str, Any]

    @property
    def number(self) -> int:
        """Line or row, from 1."""
        return int(re.split(r"\D", self.where)[-1])


@dataclass(frozen=True, slots=True)
class HubName:
    """A data set on the hub, or a directory that `datasets` reads. `revision` pins the version that a report describes."""

    repo: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @classmethod
    def of(cls, text: str) -> HubName:
        """Of REPO, REPO:SPLIT or REPO:CONFIG:SPLIT, each with @REVISION behind it or not."""
        name, _, revision = text.partition("@")
        repo, *rest = name.split(":")
        return cls(repo, rest[0] if rest[1:] else None, rest[-1] if rest else "train", revision or None)

    def __str__(self) -> str:
        parts = [self.repo, *([self.config] if self.config else []), self.split]
        return ":".join(parts) + (f"@{self.revision}" if self.revision else "")


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of a file in UTF-8, with or without a byte order mark. Raises DataError with file and line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; convert the "
                    f"file from its own encoding, e.g. iconv -f GB18030 -t UTF-8 {path.name}, or LATIN1"
                ) from None


def with_names(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """`values` under the `names` from which their own differ in capitals only."""
    lacking = {name.lower(): name for name in names if name not in values}
    found = {key: lacking.pop(key.lower()) for key in values if key not in names and key.lower() in lacking}
    return {found.get(key, key): value for key, value in values.items()} if found else values


def _named(present: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The `present` columns that are of `columns`, in whatever capitals."""
    return [name for name in present if name.lower() in map(str.lower, columns)]


def find_files(pattern: str) -> list[Path]:
    """Files behind a path, a directory or a glob pattern, sorted. Raises DataError when there are none."""
    path = Path(pattern).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = data_files(path)
    else:
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    if not found:
        raise DataError(f"{pattern}: no such file, nor files {', '.join(SUFFIXES)} below it")
    wrong = [p for p in found if p.suffix.lower() not in SUFFIXES]
    if wrong:
        raise DataError(f"{wrong[0]}: cannot read {wrong[0].suffix or 'this kind of'} files; give {', '.join(SUFFIXES)}")
    return found


def data_files(directory: Path) -> list[Path]:
    """The data files below it, sorted. Raises DataError for one that would not be read."""
    hidden = (".", "__")  # downloads' own
    files = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(hidden) for part in path.relative_to(directory).parts)
    )
    if unread := [path for path in files if path.suffix.lower() in _UNREAD]:
        raise DataError(f"{unread[0]}: such files are not read; unpack or convert it, or move it out of {directory}")
    return [path for path in files if path.suffix.lower() in SUFFIXES]


def file_rows(path: Path, *, columns: Sequence[str] | None = None, skip: int = 0) -> Iterator[Row]:
    """Rows of one file after the first `skip`. Raises DataError with file and row.

    columns: of a parquet file, the columns to read if it has them, so that long solutions of a reasoning set are not loaded.
    """
    with path.open("rb") as file:
        begin = file.read(64)
    if foreign := next((what for what, magic in _FOREIGN.items() if begin.startswith(magic)), ""):
        raise DataError(f"{path} is {foreign}")
    if begin.startswith(_PARQUET) or path.suffix == ".parquet":
        rows = _parquet_rows(path, columns)
    elif path.suffix.lower() in _TABLES:
        rows = _table_rows(path)
    else:  # sets are published as .json in both forms: an array, and an object a line
        rows = _json_rows(path) if begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else _jsonl_rows(path)
    return islice(rows, skip, None)


def _table_rows(path: Path) -> Iterator[Row]:
    """Of columns that a comma, a semicolon or a tab parts: what the first line has most of."""
    text = (line for _, line in _text_lines(path))
    names = next(text, "")
    delimiter = max(",;\t", key=names.count)
    lines = csv.DictReader(chain([names], text), strict=True, delimiter=delimiter, skipinitialspace=True)
    try:
        _each_once(path, lines.fieldnames or [])
        for number, values in enumerate(lines, 1):
            if None in values or None in values.values():
                raise DataError(f"{path} row {number}: {len(lines.fieldnames or [])} columns are named, the row has others")
            yield Row(f"{path} row {number}", values)
    except csv.Error as error:
        raise DataError(f"{path}:{lines.reader.line_num}: not a row of a table ({error}); write the rows as jsonl") from None


def _parsed(text: str, path: Path, line: int) -> Any:
    """The JSON of a text that begins in this line."""
    try:
        return load_json(text)
    except (ValueError, RecursionError) as error:
        what, remedy = json_fault(error, unit="column")
        raise DataError(f"{path}:{line + getattr(error, 'lineno', 1) - 1}: not JSON ({what}); {remedy}") from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    for number, line in _text_lines(path):
        if line.strip():
            yield _row(f"{path}:{number}", _parsed(line.rstrip("\r\n"), path, number))


def _json_rows(path: Path) -> Iterator[Row]:
    """A JSON array of objects, as some data sets are published."""
    for number, value in enumerate(_parsed("".join(line for _, line in _text_lines(path)), path, 1), 1):
        yield _row(f"{path} row {number}", value)


def _parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    with _parquet_file(path) as file:
        _each_once(path, file.schema_arrow.names)
        short = _short_floats(file.schema_arrow)
        wanted = None if columns is None else _named(file.schema_arrow.names, columns)
        batches = file.iter_batches(_BATCH_ROWS, columns=wanted)
        for number, values in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
            yield Row(f"{path} row {number}", _exact_row(values, short))


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """The open file. Errors of its reader, which do not name it, become DataError."""
    # Here: pyarrow and datasets take seconds, which jsonl files do not need.
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        yield parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise DataError(f"{path}: not a readable parquet file ({what}); copy it again from where it came") from None


def _short_floats(schema: Any) -> dict[str, Any]:
    """Columns with floats of 16 or 32 bits, and their arrow types."""
    return {field.name: field.type for field in schema if re.search(r"\b(half)?float\b", str(field.type))}


def _exact_row(values: dict[str, Any], short: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table of arrow types, as it was before it got them."""
    values |= {name: _exact(values[name], kind) for name, kind in short.items() if name in values}
    return values | {name: _without_absent(values[name]) for name in _OF_CONVERSATIONS if name in values}


def _without_absent(value: Any) -> Any:
    """Without the keys that only other rows have: in a table an object has the keys of all rows, null where it has none."""
    if isinstance(value, dict):
        return {key: _without_absent(part) for key, part in value.items() if part is not None}
    return list(map(_without_absent, value)) if isinstance(value, list) else value


def _exact(value: Any, kind: Any) -> Any:
    """A value of this arrow type whose floats of 16 and 32 bits are as they were written: 0.1, not 0.10000000149011612."""
    import numpy  # here, as pyarrow above

    inner = [kind.field(i).type for i in range(kind.num_fields)]
    match value:
        case float() if size := {"halffloat": numpy.float16, "float": numpy.float32}.get(str(kind)):
            return float(str(size(value)))
        case dict():
            return {key: _exact(part, of) for (key, part), of in zip(value.items(), inner)}
        case tuple():  # of a map
            return tuple(map(_exact, value, inner))
        case list():
            return [_exact(part, inner[0]) for part in value]
    return value


def _each_once(path: Path, names: Sequence[str]) -> None:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{path}: several columns are named {', '.join(map(repr, twice))}; rename or remove one")


def _row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected an object, got {type(values).__name__}")
    return Row(where, values)


def hub_rows(name: HubName, *, columns: Sequence[str] | None = None, skip: int = 0) -> Iterator[Row]:
    """Rows of a hub data set, streamed; of parquet files only `columns` are downloaded.

    Raises DataError when the hub or the data set cannot be reached.
    """
    import datasets  # here, as pyarrow above

    try:
        here = Path(name.repo).is_dir()
        if any((Path(name.repo) / file).is_file() for file in ("state.json", "dataset_dict.json")):  # of save_to_disk
            rows = datasets.load_from_disk(name.repo)
            if not isinstance(rows, datasets.DatasetDict):
                rows = {"train": rows}
            rows = rows[name.split]
        else:
            # A relative path could be the name of a builder: json.
            repo = str(Path(name.repo).absolute()) if here else name.repo
            builder = datasets.load_dataset_builder(repo, name.config, revision=name.revision)
            if here:
                _check_files(name, builder.config.data_files or {})
            published = builder.info.features
            if columns is not None and published is not None and hasattr(builder.config, "columns"):
                # parquet: the other columns are not even downloaded
                builder.config.columns = _named(list(published), columns)
            rows = builder.as_streaming_dataset(split=name.split)
        if columns is not None and rows.column_names:
            rows = rows.select_columns(_named(rows.column_names, columns))
        short = _short_floats(rows.features.arrow_schema if rows.features else ())
        for number, values in enumerate(rows.skip(skip) if skip else rows, skip + 1):
            yield Row(f"{name} row {number}", _exact_row(values, short))
    except DataError:
        raise
    except (OSError, ValueError, LookupError, RuntimeError, ImportError) as error:  # the hub's errors are of many types
        source, remedy = ("by datasets", "name its files") if here else ("from the hub", "download it and give its files")
        kind = DataError if here else Absent
        raise kind(f"{name}: cannot be read {source} ({type(error).__name__}: {str(error)[:300]}); {remedy}") from error


def _check_files(name: HubName, by_split: Mapping[str, Sequence[Any]]) -> None:
    """Raises DataError for a data file that datasets passes over, and for tables, whose cells it changes: 007 becomes 7."""
    directory = Path(name.repo).resolve()
    read = {Path(str(file)).resolve() for files in by_split.values() for file in files}
    if tables := sorted(file for file in read if file.suffix.lower() in _TABLES):
        raise DataError(
            f"{directory}: datasets reads texts of {tables[0].name} as numbers and dates; name the files one by one"
        )
    card = directory / "README.md"
    if not read or name.config or (card.is_file() and "configs:" in card.read_text(encoding="utf-8", errors="replace")):
        return  # which files belong together is written down
    kinds = {file.suffix.lower() for file in read}
    if odd := sorted(file.name for file in read if file.suffix.lower() not in (*SUFFIXES, ".ndjson")):  # train.jsonl.bak
        raise DataError(f"{directory}: datasets reads {odd[0]} too; move it out, or name the files one by one")
    for file in map(Path.resolve, data_files(directory)):
        about = file.suffix.lower() == ".json" and ".json" not in kinds  # report.json, dataset_infos.json
        if file not in read and not about:
            raise DataError(f"{directory}: datasets does not read {file.name} beside the others; name the files one by one")


@dataclass(frozen=True, slots=True)
class Input:
    """One file or hub split of the source `name`."""

    name: str
    path: str = ""
    hub: HubName | None = None

    @property
    def label(self) -> str:
        return self.path or str(self.hub)

    @property
    def place(self) -> Path:
        return Path(self.hub.repo if self.hub else self.path)

    @property
    def state(self) -> list[int]:
        """Times and sizes that tell whether a file has changed since it was read; the hub's are not known."""
        files = sorted(self.place.rglob("*")) if self.place.is_dir() else [self.place] if self.place.is_file() else []
        return [number for file in files for number in (file.stat().st_mtime_ns, file.stat().st_size)]

    def rows(self, columns: Sequence[str] | None = None, skip: int = 0) -> Iterator[Row]:
        """Rows after the first `skip`, under the names of `columns` (None: all, as they are). Raises DataError."""
        hub, path = self.hub, Path(self.path)
        rows = file_rows(path, columns=columns, skip=skip) if hub is None else hub_rows(hub, columns=columns, skip=skip)
        return (Row(row.where, with_names(row.values, columns or ())) for row in rows)


def data_input(path: str | Path) -> Input:
    """What an entry of `data.train_data_paths` names: a file, a directory that `datasets` reads, or a set on the hub.

    Raises DataError when there is no such file.
    """
    text = str(path)
    if text.startswith(HUB):
        return Input(text, hub=HubName.of(text.removeprefix(HUB)))
    place = Path(text).expanduser()
    if place.is_dir():
        return Input(text, hub=HubName(str(place)))
    if not place.is_file():
        hub = f"; of the hub it is {HUB}{text}" if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not place.suffix else ""
        raise Absent(f"data file {text} does not exist{hub}")
    return Input(text, str(place))


@dataclass(frozen=True, slots=True)
class Source:
    """One form of data set, and its reader."""

    name: str
    needs: tuple[str, ...]
    """Columns that a row must have; of `solution|answer` at least one."""
    read: Callable[[Mapping[str, Any]], Any]
    """Raises ValueError with the reason for a row that cannot be used."""
    hub: HubName | None = None
    optional: tuple[str, ...] = ()
    """Further columns that are read."""
    unreadable: str = ""
    """The reason in place of the error's text up to the value, which may be another for each row."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*(name for names in self.needs for name in names.split("|")), *self.optional, *BESIDE)

    def parse(self, row: Row) -> Any:
        """What `read` makes of a row. Raises Unusable, or DataError naming file, row and the columns that are missing."""
        for group in (names.split("|") for names in self.needs):
            if not any(name in row.values for name in group):
                raise DataError(
                    f"{row.where}: a row of {self.name} needs {' or '.join(map(repr, group))}; it has "
                    f"{', '.join(sorted(row.values)) or 'nothing'}"
                )
        try:
            check_media(row.values)
            return self.read(row.values)
        except Unusable:
            raise
        except ValueError as error:
            raise Unusable(self.unreadable or str(error).partition(", got ")[0]) from error


def inputs_of(word: str, sources: Mapping[str, Source]) -> list[Input]:
    """Inputs of NAME, which is its set on the hub, or of NAME=PATH. Raises DataError for an unknown shape or path."""
    name, equals, path = word.partition("=")
    if name not in sources:
        raise DataError(f"unknown source {name!r}; known shapes are {', '.join(sources)}")
    if path:
        return [Input(name, str(file)) for file in find_files(path)]
    if equals:
        raise DataError(f"--source {word}: no path after '='")
    if sources[name].hub is None:
        raise DataError(f"{name} is not on the hub under one name; give its files: --source {name}=PATH")
    return [Input(name, hub=sources[name].hub)]
