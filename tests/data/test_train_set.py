"""The whole pass on small files of the shapes that the public sets have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from rstar2_megatron.data import resumable
from rstar2_megatron.data.math_sources import SOURCES
from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.data.resumable import ResumablePass
from rstar2_megatron.data.rows import DataError, HubName, Input, Row, Source, find_files
from rstar2_megatron.data.train_set import Options, main, parse_source, process
from rstar2_megatron.records.whole_file import write_jsonl
from tests.data.test_cleaning import DAPO
from tests.data.watched import watched
from tests.small_disk import files_of_at_most


def ask(i: int) -> str:
    return f"What is the {i}th value of the {i * 7}-sided sequence that begins with {i * 13} and {i + 5}?"


def dapo_processed(i: int, answer: Any) -> dict[str, Any]:
    """As open-r1/DAPO-Math-17k-Processed."""
    return {
        "prompt": ask(i),
        "solution": answer,
        "data_source": "math_dapo",
        "source_prompt": [{"content": DAPO.format(ask(i)), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{i:08d}"},
    }


def dapo_original(i: int, answer: str) -> dict[str, Any]:
    """As BytedTsinghua-SIA/DAPO-Math-17k: messages, wrapped, the answer only in reward_model."""
    row = dapo_processed(i, answer)
    return {
        "data_source": "math_dapo",
        "prompt": row["source_prompt"],
        **{k: row[k] for k in ("ability", "reward_model", "extra_info")},
    }


def openmath(i: int, answer: str, kind: str = "has_answer_extracted") -> dict[str, Any]:
    return {
        "expected_answer": answer,
        "problem_type": kind,
        "problem_source": "aops_c6_high_school_olympiads",
        "generation_model": "DeepSeek-R1",
        "pass_rate_72b_tir": "0.65625",
        "problem": ask(i),
        "generated_solution": "<think>long</think>",
        "inference_mode": "cot",
        "used_in_kaggle": False,
    }


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    sources = tmp_path / "in"
    sources.mkdir()
    parquet.write_table(
        pyarrow.Table.from_pylist(
            [dapo_processed(i, str(i)) for i in range(20)]
            + [dapo_processed(20, "\\frac{1}{2}"), dapo_processed(21, "9" * 40), dapo_processed(22, None)]
        ),
        sources / "dapo.parquet",
    )
    write_jsonl(sources / "dapo-original.jsonl", [dapo_original(i, f"{i}.0") for i in range(15, 25)])
    parquet.write_table(
        pyarrow.Table.from_pylist(
            [
                *[openmath(i, str(i)) for i in range(30, 40)],
                *[openmath(35, "35")] * 3,
                openmath(36, "37"),  # another answer than above: neither can be trusted
                openmath(50, "1", "no_answer_extracted"),
                openmath(51, "2", "converted_proof"),
            ]
        ),
        sources / "omr.parquet",
    )
    (sources / "euler.json").write_text(
        json.dumps([{"id": 1, "question": ask(60), "answer": 233168}, {"id": 2, "question": ask(61), "answer": "1.5"}])
    )
    write_jsonl(sources / "aime.jsonl", [{"problem": f"Contest: {ask(33)}", "answer": "1"}])
    return {path.stem: path for path in sources.iterdir()}


def sources_of(files: dict[str, Path]) -> list[Input]:
    words = (
        f"dapo={files['dapo']}",
        f"dapo={files['dapo-original']}",
        f"openmathreasoning={files['omr']}",
        f"project-euler={files['euler']}",
    )
    return [source for word in words for source in parse_source(word)]


def run(files: dict[str, Path], out: Path, inputs: Sequence[Input] = (), **options: Any) -> dict:
    sources = inputs or sources_of(files)
    return process(sources, out, Options(**options), decontaminate=[str(files["aime"])])


def test_shapes_are_read_cleaned_and_counted(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(files, out, validation=5)
    assert report["rows_in"] == 23 + 10 + 16 + 2
    assert report["dropped"] == {
        "answer is no integer": 3,
        "duplicate": 9,
        "no problem or no answer": 1,
        "answer not stated by the source": 2,
        "contaminated": 1,
        "published with different answers": 1,
    }
    assert report["written"] == {"train.jsonl": 29, "validation.jsonl": 5} and report["rows_out"] == 34
    assert report["rows_in"] == report["rows_out"] + sum(report["dropped"].values())
    assert list(report["commonest_shared_ngrams"].values()) == [1]
    problems = read_problems([out / "train.jsonl", out / "validation.jsonl"])
    answers = {p.prompt[0]["content"]: p.solutions for p in problems}
    numbers = [*range(25), 30, 31, 32, 34, 35, 37, 38, 39]
    assert answers == {ask(i): [str(i)] for i in numbers} | {ask(60): ["233168"]}
    assert {p.task for p in problems} == {"dapo", "openmathreasoning", "project-euler"}
    assert json.loads((out / "report.json").read_text()) == report


def test_a_killed_pass_continues_to_the_same_result(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resumable, "SAVE_ROWS", 3)
    whole = run(files, tmp_path / "whole", validation=5)
    out, read = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):  # in the second source, after rows that were not saved yet
        run(files, out, watched(sources_of(files), read, kill_at=31), validation=5)
    assert not (out / "train.jsonl").exists()
    again: list[str] = []
    assert run(files, out, watched(sources_of(files), again), validation=5) == whole
    assert "continuing at row 7" in capsys.readouterr().out
    assert len(again) == 51 - 29 and again[0] == read[29]  # rows of whole saves are not read again
    for name in ("train.jsonl", "validation.jsonl", "report.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(p.name for p in out.iterdir()) == ["report.json", "train.jsonl", "validation.jsonl"]


def test_another_configuration_starts_from_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "SAVE_ROWS", 1)
    source = tmp_path / "rows.jsonl"
    source.write_text('{"a": 1}\n{"a": 2}\n')

    def until_the_second(name: str, row: Row) -> dict[str, Any]:
        if row.values["a"] == 2:
            raise KeyboardInterrupt
        return row.values

    shapes = {"dapo": Source("dapo", ("a",), dict)}
    with pytest.raises(KeyboardInterrupt), ResumablePass(tmp_path, {"ngram": 8}) as first:
        first.keep([Input("dapo", str(source))], shapes, None, lambda one: {}, until_the_second)
    assert list(ResumablePass(tmp_path, {"ngram": 8}).accepted()) == [{"a": 1}]
    other = ResumablePass(tmp_path, {"ngram": 9})
    assert not other.resumed and list(other.accepted()) == [] and other.row == 0


def test_a_mended_file_is_read_again(tmp_path: Path) -> None:
    """Of the pass that ended without a problem nothing is left."""
    path = tmp_path / "in.jsonl"
    for row in ({"prompt": "a", "solution": "1/2"}, {"question": "a"}):
        write_jsonl(path, [row])
        with pytest.raises(DataError, match=r"no problem is left|a row of dapo needs"):
            process(parse_source(f"dapo={path}"), tmp_path / "out", Options())
        assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError):
        process(parse_source(f"dapo={path}"), tmp_path / "out", Options())
    assert list((tmp_path / "out").iterdir()) == []
    write_jsonl(path, [{"prompt": "a", "solution": "2"}])
    assert process(parse_source(f"dapo={path}"), tmp_path / "out", Options())["rows_out"] == 1


def test_force_leaves_no_validation_set_of_an_earlier_pass(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i}?", "solution": str(i)} for i in range(20)]
    write_jsonl(tmp_path / "in.jsonl", rows)
    words = ["--source", f"dapo={tmp_path}/in.jsonl", "--out", str(tmp_path / "out")]
    assert main([*words, "--validation", "5"]) == 0 and (tmp_path / "out" / "validation.jsonl").is_file()
    (tmp_path / "out" / "train.jsonl").unlink()
    (tmp_path / "out" / "report.json").unlink()
    assert main(words) == 2  # the validation set is a result too
    assert main([*words, "--force"]) == 0 and not (tmp_path / "out" / "validation.jsonl").exists()
    assert len(read_problems([tmp_path / "out" / "train.jsonl"])) == 20


def test_no_file_of_a_directory_is_passed_over(tmp_path: Path) -> None:
    """Of problems that decontaminate, that would be one which is trained on."""
    (tmp_path / "few").mkdir()
    write_jsonl(tmp_path / "few" / "A.JSONL", [{"problem": "a b c"}])
    write_jsonl(tmp_path / "few" / "b.jsonl", [{"problem": "d e f"}])
    assert [path.name for path in find_files(str(tmp_path / "few"))] == ["A.JSONL", "b.jsonl"]
    (tmp_path / "few" / "c.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"c.jsonl.gz: such files are not read; unpack or convert it, or move it out of"):
        find_files(str(tmp_path / "few"))


def test_limit_reads_that_many_rows_of_each_input(files: dict[str, Path], tmp_path: Path) -> None:
    report = run(files, tmp_path / "out", limit=2)
    assert [counts["in"] for counts in report["sources"].values()] == [2, 2, 2, 2]


def test_a_problem_stays_in_the_validation_set_when_others_are_added(files: dict[str, Path], tmp_path: Path) -> None:
    few = process(parse_source(f"dapo={files['dapo']}"), tmp_path / "a", Options(validation=19))
    assert few["written"]["validation.jsonl"] == 19
    run(files, tmp_path / "b", validation=19)
    held = {p.query_id for p in read_problems([tmp_path / "a" / "train.jsonl"])}
    assert not held & {p.query_id for p in read_problems([tmp_path / "b" / "validation.jsonl"])}


@pytest.mark.parametrize(
    ("source", "rows", "message"),
    [
        ("dapo", [{"problem": "b"}, {"prompt": "a", "solution": "1"}], "in.jsonl:1: a row of dapo needs 'prompt'"),
        ("dapo", [{"prompt": [{"role": "system", "content": "x"}], "solution": "1"}], "in.jsonl:1: .* no user message"),
        ("dapo", [{"prompt": "a", "reward_model": {"style": "x"}}], "in.jsonl:1: .*'ground_truth'"),
        (
            "openmathreasoning",
            [{"problem": ["a"], "expected_answer": "1"}],
            "in.jsonl:1: column 'problem' of type array is no text",
        ),
        ("project-euler", [["a"]], "in.jsonl row 1: expected an object, got str"),
        ("dapo", [{"prompt": "a", "solution": "1/2"}], "no problem is left of 1 rows; dropped: .*no integer"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, source: str, rows: list[Any], message: str) -> None:
    path = tmp_path / "in.jsonl"
    write_jsonl(path, rows)
    with pytest.raises(DataError, match=message):
        process(parse_source(f"{source}={path}"), tmp_path / "out", Options())


def test_bad_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "omr.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"problem": ask(1)}]), path)
    with pytest.raises(DataError, match=r"omr.parquet row 1: a row of openmathreasoning needs 'expected_answer'"):
        process(parse_source(f"openmathreasoning={path}"), tmp_path / "out", Options())


def test_hub_names_and_their_configurations() -> None:
    (dapo,) = parse_source("dapo", config="cn")
    assert dapo.hub == HubName("open-r1/DAPO-Math-17k-Processed", "cn", "train")
    (omr,) = parse_source("openmathreasoning", split="additional_problems", config="cn")
    assert omr.hub == HubName("nvidia/OpenMathReasoning", "default", "additional_problems")
    with pytest.raises(DataError, match="all, en, cn"):
        parse_source("dapo", config="de")
    with pytest.raises(DataError, match="give its files"):
        parse_source("project-euler")
    with pytest.raises(DataError, match="known shapes"):
        parse_source("gsm8k")


def test_hub_reading_is_the_hubs_library(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """load_dataset on a directory takes the same way as on the hub: streaming, columns, skip."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    directory = tmp_path / "omr"
    directory.mkdir()
    (directory / "cot.parquet").write_bytes(files["omr"].read_bytes())
    features = "".join(
        f"  - name: {name}\n    dtype: {'bool' if name == 'used_in_kaggle' else 'string'}\n" for name in openmath(0, "")
    )
    (directory / "README.md").write_text(f"---\ndataset_info:\n  features:\n{features}---\n")
    hub = Input("openmathreasoning", hub=HubName(str(directory), None, "train"))
    rows = list(hub.rows(SOURCES["openmathreasoning"].columns, skip=3))
    assert len(rows) == 13 and set(rows[0].values) == {"problem", "expected_answer", "problem_type"}
    assert rows[0].where.endswith(":train row 4") and rows[0].values["expected_answer"] == "33"


def test_command_line(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["--out", str(out), "--source", f"dapo={files['dapo']}", "--validation", "2"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "23 rows in" in said and "not compared with any evaluation set: --decontaminate" in said
    assert main(command) == 2
    assert "already holds train.jsonl" in capsys.readouterr().err
    assert main([*command, "--force", "--decontaminate", str(files["aime"])]) == 0
    assert "not compared" not in capsys.readouterr().out
    assert main(["--out", str(tmp_path / "x"), "--source", "dapo=/nowhere"]) == 2
    assert "/nowhere: no such file" in capsys.readouterr().err
    for flag, value in (("--limit", "0"), ("--validation", "-1"), ("--boilerplate", "1"), ("--boilerplate", "-1")):
        assert main([*command, "--force", flag, value]) == 2
        assert f"{flag} must be " in capsys.readouterr().err
    for flag, value, name in (("--config", "cn", "dapo"), ("--split", "tir", "openmathreasoning")):
        assert main([*command, "--force", flag, value]) == 2
        assert f"{flag} is of {name} on the hub" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert main(["--out", str(tmp_path / "y"), "--source", "dapo"]) == 2
    assert "cannot be read from the hub" in capsys.readouterr().err and not (tmp_path / "y").exists()


def test_what_fails_while_it_is_written_is_no_refused_input(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(1000):
        assert main(["--out", str(tmp_path / "out"), "--source", f"dapo={files['dapo']}"]) == 1
    assert "File too large" in capsys.readouterr().err


def test_rows_from_hostile_hands_become_files_that_training_reads(tmp_path: Path) -> None:
    """Whatever stands in a row, the conversion ends well, and each line that it writes is read."""
    odd: list[Any] = [
        None,
        True,
        float("nan"),
        float("inf"),
        2.0**60,
        10**400,
        [],
        {},
        "",
        " ",
        "\0",
        "\ud800",
        "2\x1b",
        "²",
        "٣",
    ]
    rows = [{"prompt": "First?", "solution": "1"}]
    rows += [{"prompt": f"Of {i}, what is asked?", "solution": value} for i, value in enumerate(odd)]
    rows += [{"prompt": value, "solution": "2"} for value in odd] + [{"prompt": "No answer?"}, {"solution": "3"}]
    rows += [{"prompt": f"Written {value}", "solution": "4"} for value in odd if isinstance(value, str)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = process(parse_source(f"dapo={path}"), tmp_path / "out", Options())
    problems = read_problems([tmp_path / "out" / "train.jsonl"])
    assert report["rows_in"] == len(rows) == len(problems) + sum(report["dropped"].values())
    assert {problem.solutions[0] for problem in problems} == {"1", "2", "4"}
    counts = report["sources"][str(path)]
    assert counts["first_dropped"].keys() == counts["dropped"].keys()
    assert counts["first_dropped"]["without a column that the first row has"] == f"{path}:{1 + 2 * len(odd) + 1}"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_may_differ_in_capitals(tmp_path: Path, suffix: str) -> None:
    rows = [{"Problem": ask(i), "Expected_Answer": str(i), "PROBLEM_TYPE": "has_answer_extracted"} for i in range(3)]
    path, held_out = tmp_path / f"in{suffix}", tmp_path / f"aime{suffix}"
    for file, content in ((path, rows), (held_out, [{"Problem": ask(2)}])):
        if suffix == ".jsonl":
            write_jsonl(file, content)
        else:
            parquet.write_table(pyarrow.Table.from_pylist(content), file)
    report = process(parse_source(f"openmathreasoning={path}"), tmp_path / "out", Options(), decontaminate=[str(held_out)])
    assert report["rows_out"] == 2 and report["dropped"]["contaminated"] == 1
