"""Data of other forms: verl's columns, other files, other names of columns, rows mapped by the user's function."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import math
import pickle
import re
import shutil
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rstar2_megatron.data.problems import Columns, read_problems
from rstar2_megatron.data.rows import DataError, HubName
from rstar2_megatron.evaluation.configure import read_benchmarks
from rstar2_megatron.extension.user_code import FOLDERS, UserCode
from rstar2_megatron.settings.load import load
from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.sft.rows import read_segments
from rstar2_megatron.trajectory import Problem

ROWS: list[dict[str, Any]] = [{"question": f"How much is {i} and 2?", "answer": str(i + 2), "level": "easy"} for i in range(3)]
KEYS = Columns("question", "answer")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if path.name == "array.json" else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def own(folder: Path, text: str, name: str = "row") -> Columns:
    (folder / "my_data.py").write_text(text)
    return Columns(rows=UserCode.model_validate(f"my_data.py:{name}", context={FOLDERS: [folder]}))


def contents(problems: list[Problem]) -> list[tuple[str, list[str], dict[str, Any]]]:
    return [(problem.prompt[0]["content"], problem.solutions, problem.extra) for problem in problems]


@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "array.json", "a.parquet", "a.csv"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path, name: str) -> None:
    problems = read_problems([write_rows(tmp_path / name, ROWS)], KEYS)
    assert contents(problems) == [(row["question"], [row["answer"]], {"level": "easy"}) for row in ROWS]
    assert len({problem.query_id for problem in problems}) == 3


@pytest.mark.ci
def test_directories_that_datasets_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a directory the split train: its test set is not trained on."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    published = tmp_path / "published"
    write_rows(published / "data" / "train-00000-of-00001.parquet", ROWS)
    write_rows(published / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    expected = [(row["question"], [row["answer"]], {"level": "easy"}) for row in ROWS]
    assert contents(read_problems([published], KEYS)) == expected
    assert contents(read_problems([f"hf:{published}:test"], KEYS)) == expected[:1]
    with pytest.raises(DataError, match=r"published:tset: cannot be read by datasets"):
        read_problems([f"hf:{published}:tset"], KEYS)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert contents(read_problems([tmp_path / "saved"], KEYS)) == expected
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "dict")
    assert contents(read_problems([tmp_path / "dict"], KEYS)) == expected


def test_a_saved_set_without_splits_is_a_training_set(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved:test: cannot be read by datasets"):
        read_problems([f"hf:{tmp_path}/saved:test"], KEYS)


def test_a_directory_of_which_datasets_would_pass_over_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("a.jsonl", "b.jsonl", "c.parquet"):
        write_rows(tmp_path / "mixed" / name, ROWS)
    with pytest.raises(DataError, match=r"datasets does not read c.parquet beside the others; name the files one by one"):
        read_problems([tmp_path / "mixed"], KEYS)
    for name in ("code.jsonl", "math_train.jsonl"):
        write_rows(tmp_path / "named" / name, ROWS)
    with pytest.raises(DataError, match=r"datasets does not read code.jsonl beside the others"):
        read_problems([tmp_path / "named"], KEYS)
    write_rows(tmp_path / "kept" / "train.jsonl", ROWS)
    shutil.copy(tmp_path / "kept" / "train.jsonl", tmp_path / "kept" / "train.jsonl.bak")
    with pytest.raises(DataError, match=r"datasets reads train.jsonl.bak too; move it out, or name the files one by one"):
        read_problems([tmp_path / "kept"], KEYS)
    (tmp_path / "capitals").mkdir()
    shutil.copy(tmp_path / "kept" / "train.jsonl", tmp_path / "capitals" / "train.JSONL")
    with pytest.raises(DataError, match=r"capitals:train: cannot be read by datasets .*; name its files"):
        read_problems([tmp_path / "capitals"], KEYS)
    assert len(read_problems([tmp_path / "capitals" / "train.JSONL"], KEYS)) == 3
    write_rows(tmp_path / "tables" / "a.csv", [{"question": "q", "answer": "007"}])
    with pytest.raises(DataError, match=r"datasets reads texts of a.csv as numbers and dates; name the files one by one"):
        read_problems([tmp_path / "tables"], KEYS)


def test_directories_with_other_files_about_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of a conversion, a snapshot of the hub, and all of it behind a link."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("train.jsonl", "validation.jsonl", ".cache/huggingface/a.jsonl"):
        write_rows(tmp_path / "disk" / "set" / name, ROWS)
    for name in ("report.json", "dataset_infos.json"):
        (tmp_path / "disk" / "set" / name).write_text("{}")
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    assert len(read_problems([tmp_path / "home" / "set"], KEYS)) == 3
    for name in ("a/x.parquet", "b/y.parquet"):
        write_rows(tmp_path / "configs" / name, ROWS)
    (tmp_path / "configs" / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: a/*.parquet\n- config_name: two\n  data_files: b/*.parquet\n---\n"
    )
    assert len(read_problems([f"hf:{tmp_path}/configs:one:train"], KEYS)) == 3


def test_a_directory_with_the_name_of_a_reader_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "json" / "train.jsonl", ROWS)
    write_rows(tmp_path / "other.jsonl", ROWS[:1])
    assert len(read_problems(["json"], KEYS)) == 3


def test_names_of_the_hub() -> None:
    assert HubName.of("openai/gsm8k:main:test@v1") == HubName("openai/gsm8k", "main", "test", "v1")
    assert HubName.of("owner/name") == HubName("owner/name", None, "train", None)
    assert HubName.of("owner/name:test") == HubName("owner/name", None, "test", None)
    with pytest.raises(DataError, match=r"openai/gsm8k does not exist; of the hub it is hf:openai/gsm8k"):
        read_problems(["openai/gsm8k"])


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train"},
}


def test_verls_columns_without_a_key(tmp_path: Path) -> None:
    (problem,) = read_problems([write_rows(tmp_path / "train.parquet", [VERL])])
    assert problem == Problem(
        "train-1", VERL["prompt"], ["2"], "openai/gsm8k", {k: v for k, v in VERL.items() if k != "prompt"}
    )


def test_a_ground_truth_of_objects_is_json(tmp_path: Path) -> None:
    truths: list[Any] = [{"target": 24, "numbers": [4, 6]}, ["2", "two"], 2, [["2", None]]]
    rows = [{**VERL, "reward_model": {"style": "rule", "ground_truth": truth}} for truth in truths]
    problems = read_problems([write_rows(tmp_path / "a.jsonl", rows)])
    assert [p.solutions for p in problems] == [['{"target": 24, "numbers": [4, 6]}'], ["2", "two"], ["2"], ['[["2", null]]']]
    assert [p.extra["reward_model"]["ground_truth"] for p in problems] == truths


@pytest.mark.parametrize(
    ("truth", "solutions"),
    [
        ('["34"]', ["34"]),
        *[
            (text, [text])
            for text in (
                "['a', 'b']",
                "[{'input': 1, 'output': nan}]",
                '["#", "."]\n[".", "#"]',
                '["a", "b"] or ["c"]',
                "[1, 2]",
            )
        ],
    ],
)
def test_a_ground_truth_as_text_is_one_answer(tmp_path: Path, truth: str, solutions: list[str]) -> None:
    row = {**VERL, "reward_model": {"ground_truth": truth}}
    assert read_problems([write_rows(tmp_path / "a.jsonl", [row])])[0].solutions == solutions


@pytest.mark.parametrize(
    "media", ["[]", "{}", "None", "null", "nan", [{"bytes": None, "path": None}], [[]], {"path": ""}, 0, math.nan], ids=repr
)
def test_a_column_without_a_picture_is_none(tmp_path: Path, media: Any) -> None:
    row = {"prompt": "1+1?", "solutions": "2", "images": media, "image": media}
    assert read_problems([write_rows(tmp_path / "a.jsonl", [row])])[0].solutions == ["2"]


@pytest.mark.parametrize("truth", [Decimal("2.5"), date(2024, 1, 2), b"2", float("nan"), True, ["2", None]], ids=repr)
@pytest.mark.parametrize("nested", [False, True])
def test_a_ground_truth_that_is_no_answer_is_refused(tmp_path: Path, truth: Any, nested: bool) -> None:
    if nested and isinstance(truth, float | bool | list):
        return  # an object may hold what JSON can
    row = {**VERL, "reward_model": {"ground_truth": {"a": truth} if nested else truth}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet row 1: ('solutions' must be|a column is no JSON)"):
        read_problems([tmp_path / "a.parquet"])


def test_alpacas_input_belongs_to_the_problem(tmp_path: Path) -> None:
    keys = Columns("instruction", "output")
    row = {"instruction": "Add the numbers.", "input": "", "output": "3"}
    assert read_problems([write_rows(tmp_path / "a.jsonl", [row])], keys)[0].prompt[0]["content"] == "Add the numbers."
    with pytest.raises(DataError, match=r"a.jsonl:1: 'input' belongs to the problem and is not in 'instruction'; put it"):
        read_problems([write_rows(tmp_path / "a.jsonl", [row | {"input": "1, 2"}])], keys)


WHOLE = "Which is it?\nA) 1,000\nB) $\\dfrac{1}{2}$ cm\nC) cat"


@pytest.mark.parametrize(
    ("prompt", "options", "answer"),
    [
        *[
            (WHOLE, options, "A")
            for options in (
                [["A", "cat"], ["B", "dog"]],
                '{"A": "cat", "B": "dog"}',
                "A) cat, B) dog",
                ["a) Cow", "b) Dog"],
                ["1. cow", "2. dog"],
                ["A - cow", "B - dog"],
                [1000.0, 2000.0],
                ["\\frac12", "\\frac13"],
                "['cow' 'dog']",
            )
        ],
        ("Is it a cat or a dog?", ["Cat", "Dog"], 1),
        ("How long is it?", ["2 cm", "3 cm"], "2"),
        ("How long is it?", ["5 cm", "6 cm"], "5"),
        ("How many are there?", "--shuffle", "1"),
        ("How many are there?", {"tags": ["algebra"]}, "1"),
        ("How many are there?", {"text": [], "label": []}, "2"),
        ("Who may give blood to all?", ["A", "B", "AB", "O"], "O"),
        ("Is it true?", ["A", "B"], "A"),
    ],
)
def test_choices_in_the_prompt_in_any_spelling_are_whole(tmp_path: Path, prompt: str, options: Any, answer: Any) -> None:
    row = {"prompt": prompt, "solutions": answer, "options": options}
    assert read_problems([write_rows(tmp_path / "a.jsonl", [row])])[0].solutions == [str(answer)]


@pytest.mark.parametrize(
    "options", ['{"A": "cat", "B": "dog"}', ["A)cat", "B)dog"], [["A", "cat"], ["B", "dog"]], "['cat' 'dog']"]
)
@pytest.mark.parametrize("answer", ["A", "(b)"])
def test_choices_of_any_form_that_are_not_in_the_prompt_are_refused(tmp_path: Path, options: Any, answer: str) -> None:
    row = {"prompt": "What is it?", "solutions": answer, "options": options}
    with pytest.raises(DataError, match=r"a.jsonl:1: 'options' belongs to the problem"):
        read_problems([write_rows(tmp_path / "a.jsonl", [row])])


ARRAYS = {
    "texts": ("1+1?", np.array(["4", "5"], dtype=object)),
    "messages": (np.array([{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}], dtype=object), "2"),
    "arrays": ("1+1?", "array(['4'], dtype=object)"),
    "arrays in a list": ("1+1?", [np.array(["4"], dtype=object)]),
    "a null": ("1+1?", ["4", float("nan")]),
    "cut off": ("[{'role': 'user', 'content': '1+", "2"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_pandas_makes_of_arrays_in_csv_is_refused(tmp_path: Path, name: str) -> None:
    prompt, solutions = ARRAYS[name]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "solutions"], [str(prompt), str(solutions)]])
    with pytest.raises(DataError, match=r"a.csv row 1: '(prompt|solutions)' is a list that .* parquet or jsonl"):
        read_problems([tmp_path / "a.csv"])


@pytest.mark.parametrize(
    "text",
    ["[1, 2)", "[x]", "[1, 2]", "[4 5]", "[{1, 2}, {3}]", "[a', b']", "['a', 'b'] has which permutations?", "[{x}, {y}]", "[]"],
)
def test_other_texts_in_brackets_stay_texts(tmp_path: Path, text: str) -> None:
    (problem,) = read_problems([write_rows(tmp_path / "a.csv", [{"prompt": text, "solutions": text}])])
    assert (problem.prompt[0]["content"], problem.solutions) == (text, [text])


def test_as_many_directories_as_tell_files_apart(tmp_path: Path) -> None:
    names = [
        "gsm8k/main/train.jsonl",
        "math/main/train.jsonl",
        "d/rows.jsonl",
        "d/rows.parquet",
        "else.jsonl",
        "x/t.jsonl",
        "x/t.csv",
        "y/t.jsonl",
        "y/t.csv",
    ]
    problems = read_problems([write_rows(tmp_path / name, ROWS[:1]) for name in names], KEYS)
    ids = [problem.query_id for problem in problems]
    both = ["x-t.jsonl-1", "x-t.csv-1", "y-t.jsonl-1", "y-t.csv-1"]
    assert ids == ["gsm8k-main-train-1", "math-main-train-1", "rows.jsonl-1", "rows.parquet-1", "else-1", *both]


def test_exact_decimals_of_parquet_are_answers(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", [{"prompt": "a", "solutions": Decimal("2.50")}])
    assert read_problems([path])[0].solutions == ["2.50"]


def test_files_of_one_name_in_two_directories(tmp_path: Path) -> None:
    """As verl's sets are: data/gsm8k/train.parquet and data/math/train.parquet."""
    paths = [write_rows(tmp_path / name / "train.parquet", [VERL]) for name in ("gsm8k", "math")]
    assert [p.query_id for p in read_problems(paths)] == ["gsm8k-train-1", "math-train-1"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q", "answer": "1"}, "it has answer, question; set data.prompt_key=question data.answer_key=answer"),
        ({"Problem": "q", "solution": "s", "answer": "1"}, "set data.prompt_key=Problem data.answer_key=answer"),
        ({"problem": "q", "solution": "s"}, "set data.prompt_key=problem data.answer_key=solution"),
        ({"prompt": "q", "ground_truth": "1"}, "row without 'solutions'; .*; set data.answer_key=ground_truth"),
        ({"question": "q", "reward_model": {"ground_truth": "1"}}, "set data.prompt_key=question$"),
        ({"story": "q", "answer": "1"}, r"it has answer, story; map it by data.rows=my_data.py:row \(docs/extend.md\)"),
    ],
)
def test_the_keys_are_proposed_by_the_names_of_the_columns(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_problems([write_rows(tmp_path / "a.jsonl", [row])])


def test_a_column_without_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.parquet row 1: a column is no JSON \(Object of type bytes.* map it by data.rows"):
        read_problems([write_rows(tmp_path / "a.parquet", [{**ROWS[0], "raw": b"\x89PNG"}])], KEYS)


TEXT = '{"question": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("an array.jsonl", f"[{TEXT}]".encode()),
        ("a mark of the byte order.json", b"\xef\xbb\xbf" + f"\n [{TEXT}]".encode()),
        ("semicolons.csv", b"question;answer\n1+1?;2\n"),
        ("tabs.csv", b"question\tanswer\n1+1?\t2\n"),
        ("tabs.TSV", b"question\tanswer\n1+1?\t2\n"),
        ("spaces.csv", b'question, answer\n"1+1?", "2"\n'),
    ],
)
def test_a_file_is_what_it_holds(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = read_problems([tmp_path / name], KEYS)
    assert (problem.prompt[0]["content"], problem.solutions) == ("1+1?", ["2"])


def test_a_parquet_file_of_any_name(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", ROWS).rename(tmp_path / "a.PARQ")
    assert len(read_problems([tmp_path / "a.PARQ"], KEYS)) == 3


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(TEXT.encode()), "a gzip file; unpack it by gunzip"),
        (bz2.compress(TEXT.encode()), "a bzip2 file; unpack it by bunzip2"),
        (lzma.compress(TEXT.encode()), "an xz file; unpack it by unxz"),
        (b"\x28\xb5\x2f\xfd\x00", "a zstd file; unpack it by unzstd"),
        (b"PK\x03\x04\x14", "a zip or xlsx file; unpack it, or export the table as csv"),
        (TEXT.encode("utf-16"), "UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
        (pickle.dumps([1]), "a pickle, which is not read; write the rows as jsonl or parquet"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS and no data; git lfs pull"),
        (b"[" * 100_000, "rows.jsonl:1: not JSON (it is nested too deeply); nest it less"),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",  # packed bytes hold the time
)
def test_what_no_rows_can_be_read_from_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(what)) as refused:
        read_problems([path], KEYS)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_column_of_a_name_twice_is_refused(tmp_path: Path, suffix: str) -> None:
    path, names = tmp_path / f"a{suffix}", ["prompt", "solutions", "solutions"]
    path.write_text(",".join(names) + "\n1+1?,2,3\n")
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_arrays([pa.array([text]) for text in ("1+1?", "2", "3")], names=names), path)
    with pytest.raises(DataError, match=rf"a{suffix}: several columns are named 'solutions'; rename or remove"):
        read_problems([path])


def test_short_floats_of_parquet_are_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "set"
    directory.mkdir()
    numbers = pa.array([0.1], pa.float32())
    half = pa.array(np.array([0.1], np.float16))
    kind = pa.list_(pa.struct({"a": pa.float32(), "b": pa.map_(pa.string(), pa.float32())}))
    nested = pa.array([[{"a": 0.1, "b": [("k", 0.2)]}, None]], kind)
    columns = {"prompt": ["1/10?"], "solutions": numbers, "half": half, "nested": nested, "whole": [0.123046875]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (problem,) = read_problems([tmp_path / "a.parquet"])
    assert problem.solutions == ["0.1"]
    assert problem.extra == {"half": 0.1, "nested": [{"a": 0.1, "b": [["k", 0.2]]}, None], "whole": 0.123046875}
    kind = pa.list_(pa.struct({"a": pa.float32()}))  # datasets knows no maps
    columns |= {"nested": pa.array([[{"a": 0.1}, None]], kind)}
    pq.write_table(pa.table(columns), directory / "train.parquet")
    (problem,) = read_problems([directory])
    assert problem.solutions == ["0.1"]
    assert problem.extra == {"half": 0.1, "nested": [{"a": 0.1}, None], "whole": 0.123046875}


@pytest.mark.parametrize("damage", [slice(200, 3000), slice(-100, -8), slice(4, 40)])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, damage: slice) -> None:
    path = write_rows(tmp_path / "a.parquet", [{"question": f"{i}?", "answer": str(i)} for i in range(5000)])
    content = bytearray(path.read_bytes())
    content[damage] = b"\xff" * len(content[damage])
    path.write_bytes(content)
    for read in (lambda: read_problems([path], KEYS), lambda: list(read_segments([path]))):
        with pytest.raises(DataError, match=r"a.parquet: not a readable parquet file \(.*\); copy it again") as refused:
            read()
        assert "\n" not in str(refused.value)


def test_an_object_over_several_lines_of_jsonl(tmp_path: Path) -> None:
    for text in (json.dumps(ROWS[0], indent=1), '{"question": [\n"1+1?"]}', '{"question": "1+1?"'):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(
            DataError, match=r"a.jsonl:1: not JSON \(the line ends before its object\); write one whole JSON ob"
        ):
            read_problems([tmp_path / "a.jsonl"], KEYS)


def test_an_arrow_file_of_datasets(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    with pytest.raises(DataError, match="is an Arrow file; give the directory that datasets saved"):
        read_problems([file], KEYS)


def test_a_table_with_a_cell_too_many(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n1+1?,2,3\n")
    with pytest.raises(DataError, match=r"a.csv row 1: 2 columns are named, the row has others"):
        read_problems([tmp_path / "a.csv"], KEYS)
    (tmp_path / "b.csv").write_text("question,answer\n" + 200_000 * "a" + ",2\n")
    with pytest.raises(DataError, match=r"b.csv:2: not a row of a table \(field larger .*; write the rows as jsonl"):
        read_problems([tmp_path / "b.csv"], KEYS)


OWN = """
from rstar2_megatron.trajectory import Problem

def row(row):
    if row["level"] == "hard":
        return None
    if row["level"] == "whole":
        return Problem("", [{"role": "user", "content": row["question"]}], [row["answer"]], "sums", {"level": "whole"})
    return {"prompt": row["question"], "solutions": row["answer"].split("#### ")[1], "level": row["level"]}
"""


def test_rows_are_mapped_by_the_users_function(tmp_path: Path) -> None:
    rows = [
        {"question": "1+1?", "answer": "one more\n#### 2", "level": "easy"},
        {"question": "2+2?", "answer": "", "level": "hard"},
        {"question": "3+3?", "answer": "6", "level": "whole"},
    ]
    said: list[str] = []
    path = write_rows(tmp_path / "a.parquet", rows)
    columns = own(tmp_path, OWN)
    data = DataSettings(train_data_paths=[], max_prompt_length=8, rollout_batch_size=1, rows=columns.rows)
    assert read_problems([path], data, said.append) == [
        Problem("a-1", [{"role": "user", "content": "1+1?"}], ["2"], "math", {"level": "easy"}),
        Problem("a-3", [{"role": "user", "content": "3+3?"}], ["6"], "sums", {"level": "whole"}),
    ]
    assert said == ["2 problems; data.rows=my_data.py:row dropped 1 rows"]
    changed = own(tmp_path, OWN.replace('"hard"', '"whole"').replace("sums", "never"))
    with pytest.raises(DataError, match="IndexError"):  # a changed function reads the file again
        read_problems([path], changed)


ENUMS = """
from enum import Enum, IntEnum

class Level(IntEnum):
    HARD = 2

class Kind(str, Enum):
    SUM = "sum"

def row(row):
    return {"prompt": Kind.SUM, "solutions": [Kind.SUM], "task": Kind.SUM, "level": Level.HARD, "kind": Kind.SUM}
"""


def test_rows_hold_no_classes_of_the_users(tmp_path: Path) -> None:
    """Other processes do not know them."""
    (problem, *_) = read_problems([write_rows(tmp_path / "a.jsonl", ROWS)], own(tmp_path, ENUMS))
    values = [problem.prompt[0]["content"], *problem.solutions, problem.task, *problem.extra.values()]
    assert values == ["sum", "sum", "sum", 2, "sum"] and [type(v) for v in values] == [str, str, str, int, str]


def test_answers_of_numpy_and_in_a_tuple(tmp_path: Path) -> None:
    for answers, read in {"(1, '2')": ["1", "2"], "np.int64(42)": ["42"], "np.array([3, 4])": ["3", "4"]}.items():
        text = f"import numpy as np\ndef row(row): return {{'prompt': 'a', 'solutions': {answers}}}"
        (problem, *_) = read_problems([write_rows(tmp_path / "a.jsonl", ROWS)], own(tmp_path, text))
        assert problem.solutions == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "def row(row):\n    return row['no']",
            r"a.jsonl:1: data.rows=my_data.py:row failed: .*my_data.py:2, in row: KeyError",
        ),
        (
            "def row(row): return [row]",
            r"a.jsonl:1: data.rows=my_data.py:row returned a list; return a dict, a Problem, or None",
        ),
        (
            "def row(row): return {'prompt': 'a', 'solutions': '1', 3: 4}",
            r"a.jsonl:1: data.rows returned a row with the key 3; a column's name is a text",
        ),
        (
            "def row(row):\n    deep = []\n    for _ in range(100_000): deep = [deep]\n"
            "    return {'prompt': 'a', 'solutions': '1', 'x': deep}",
            r"a.jsonl:1: a column is no JSON \(.*map it by data.rows",
        ),
        ("def row(row): return {}", r"a.jsonl:1: row without 'prompt'; it has nothing; map it by data.rows"),
        ("def row(row): return {'prompt': '', 'solutions': '1'}", r"a.jsonl:1: 'prompt' is empty"),
        ("def row(row): return None", r"no problems in .*a.jsonl; data.rows=my_data.py:row dropped 3 rows"),
        ("def row(a, b): ...", r"takes \(a, b\), but is called by \(row\): missing .*'b'; write def row\(row\)"),
        ("row = 3", r"data.rows=my_data.py:row is of type int; write def row\(row\)"),
        ("def rows(row): ...", r"my_data.py has no 'row'; did you mean rows\?"),
    ],
)
def test_bad_functions_are_told_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        read_problems([write_rows(tmp_path / "a.jsonl", ROWS)], own(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_scores_of_two_files_of_one_name_are_not_mixed(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / name / "test.parquet", [VERL]) for name in ("gsm8k", "math")]
    settings = load("rstar2-tiny-cpu", []).settings
    with pytest.raises(DataError, match="have one name, by which their scores are told apart; rename one"):
        read_benchmarks(paths, None, settings)


def test_a_query_id_of_two_benchmarks_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "1+1?", "solutions": ["2"], "query_id": "sum"}
    paths = [write_rows(tmp_path / name, [row]) for name in ("first.jsonl", "second.jsonl")]
    settings = load("rstar2-tiny-cpu", []).settings
    with pytest.raises(DataError, match="second: query_id 'sum' was already used in first; make them unique"):
        read_benchmarks(paths, None, settings)
