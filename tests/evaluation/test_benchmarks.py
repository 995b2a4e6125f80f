"""Public benchmarks: small files of the data sets' shapes through `datasets` into rows that training reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.evaluation.benchmarks import BENCHMARKS, convert, load
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.reward.pool import GraderPool
from tests.e2e.runs import ROOT

# Rows as the public data sets have them: types and column names; the problems are made up.
SHAPES: dict[str, list[dict]] = {
    "aime24": [{"id": 60, "problem": "One?", "solution": "It is 1.", "answer": "025", "url": "u", "year": "2024"}],
    "aime25": [{"problem_idx": 1, "problem": "Two?", "answer": 70, "problem_type": ["Number Theory"]}],
    "hmmt25": [{"problem_idx": 7, "problem": "Root?", "answer": "1-\\frac{2}{\\pi}", "problem_type": ["Algebra"]}],
    "math500": [
        {
            "problem": "Polar?",
            "solution": "...",
            "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        }
    ],
    "gpqa-diamond": [
        {
            "Record ID": f"rec{i}",
            "Question": f"Which of these is {i}?",
            "Correct Answer": f"right {i}\n",
            "Incorrect Answer 1": "wrong one",
            "Incorrect Answer 2": "wrong two",
            "Incorrect Answer 3": "wrong three",
        }
        for i in range(40)
    ],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))  # for child processes


def local_copy(name: str, directory: Path) -> Path:
    """A directory as the hub lays it out: data/{split}-00000-of-00001.parquet."""
    split = BENCHMARKS[name].split
    target = directory / name / "data" / f"{split}-00000-of-00001.parquet"
    target.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(SHAPES[name]), target)
    return directory / name


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_a_copy_of_the_data_set_becomes_problems(name: str, tmp_path: Path) -> None:
    rows = load(name, local_copy(name, tmp_path))
    write_jsonl(tmp_path / f"{name}.jsonl", iter(rows))
    problems = read_problems([tmp_path / f"{name}.jsonl"])
    assert [p.task for p in problems] == [name] * len(SHAPES[name])
    assert len({p.query_id for p in problems}) == len(problems)


def test_answers_are_what_the_grader_takes(tmp_path: Path) -> None:
    spellings = {"aime24": "25", "aime25": "70", "hmmt25": "1 - 2/\\pi", "math500": "(3,\\frac\\pi2)"}
    with GraderPool(1) as pool:
        for name, answer in spellings.items():
            (row,) = convert(name, SHAPES[name])
            assert pool.grade_now(f"<answer>\\boxed{{{answer}}}</answer>", row["solutions"]).reward == 1.0, name


def test_choices_are_shuffled_and_the_letter_follows() -> None:
    rows = convert("gpqa-diamond", SHAPES["gpqa-diamond"], seed=3)
    letters = [row["solutions"][0] for row in rows]
    for row, shape in zip(rows, SHAPES["gpqa-diamond"]):
        line = next(line for line in row["prompt"].splitlines() if line.startswith(f"({row['solutions'][0]})"))
        assert line == f"({row['solutions'][0]}) {shape['Correct Answer'].strip()}"
        assert sum(line.startswith("(") for line in row["prompt"].splitlines()) == 4
    assert set(letters) == set("ABCD")
    assert letters == [r["solutions"][0] for r in convert("gpqa-diamond", SHAPES["gpqa-diamond"], seed=3)]
    assert letters != [r["solutions"][0] for r in convert("gpqa-diamond", SHAPES["gpqa-diamond"], seed=4)]


def test_every_letter_of_the_right_text_is_right() -> None:
    shape = SHAPES["gpqa-diamond"][0] | {"Incorrect Answer 2": "right 0"}
    (row,) = convert("gpqa-diamond", [shape])
    lines = [line for line in row["prompt"].splitlines() if line.startswith("(") and line.endswith("right 0")]
    assert [line[1] for line in lines] == row["solutions"] and len(lines) == 2


def test_an_answer_of_zero_is_an_answer() -> None:
    (row,) = convert("aime25", [{"problem_idx": 2, "problem": "Zero?", "answer": 0}])
    assert row["solutions"] == ["0"]


def test_another_shape_is_an_error_that_shows_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no text or number in \['problem', 'answer'\]; its columns are \['question'\]"):
        convert("aime24", [{"question": "?"}])
    with pytest.raises(DataError, match="repeats aime24-60"):
        convert("aime24", SHAPES["aime24"] * 2)
    with pytest.raises(DataError, match="unknown benchmark 'aime23'"):
        load("aime23")
    with pytest.raises(DataError, match="cannot be loaded"):
        load("math500", tmp_path / "nothing.csv")


def test_a_local_file_is_named_by_its_own_name_and_rows_count_from_1(tmp_path: Path) -> None:
    copy = tmp_path / "mine.jsonl"
    good = {"Problem": "One?", "ANSWER": 1, "Problem_Idx": 1}
    for odd, said in (
        ({"problem": "Two?", "answer": None}, r"has no text or number in \['answer'\]; its columns are"),
        ({"problem": "Two?", "answer": True}, r"has no text or number in \['answer'\]"),
        ({"problem": "Two?", "answer": [2]}, r"has no text or number in \['answer'\]"),
        ({"problem": "Two\0?", "answer": 2, "problem_idx": 2}, r"'prompt' has the control character U\+0000"),
    ):
        with pytest.raises(DataError, match=rf"aime25: row 2 of {copy}:? {said}"):
            convert("aime25", [good, odd], source=copy)
    copy.write_text("\n".join(json.dumps({**good, "Problem": text}) for text in ("One?", " ")))
    with pytest.raises(DataError, match=f"aime25: row 2 of {copy} has no text or number in"):
        load("aime25", copy)
    (row,) = convert("aime25", [good])
    assert (row["prompt"], row["solutions"], row["query_id"]) == ("One?", ["1"], "aime25-1")


def test_the_program_writes_and_reports(tmp_path: Path) -> None:
    copy = tmp_path / "math.jsonl"
    copy.write_text(json.dumps(SHAPES["math500"][0]) + "\n")
    words = [sys.executable, "data_process/process_eval_dataset.py", "--out", str(tmp_path / "out")]
    good = subprocess.run(
        [*words, "--benchmarks", "math500", "--source", str(copy)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert good.returncode == 0, good.stderr
    assert len(read_problems([tmp_path / "out" / "math500.jsonl"])) == 1
    refused = subprocess.run([*words, "--source", str(copy)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "one benchmark" in refused.stderr
    copy.write_text("{}\n")
    refused = subprocess.run(
        [*words, "--benchmarks", "math500", "--source", str(copy)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 2 and "has no text or number in" in refused.stderr
