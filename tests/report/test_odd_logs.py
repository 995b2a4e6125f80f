"""Every row of the section "Logs" of docs/inputs.md, tried on a log beside a good one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rstar2_megatron.report.curves import main
from rstar2_megatron.report.log_formats import Log
from rstar2_megatron.report.names import LENGTH, REWARD
from rstar2_megatron.report.read import read_logs
from tests.report.test_report import write_run
from tests.runs.inputs.documented import answers, is_answer

ANSWERS = answers("Logs")
HEAD = "Step,run - critic/rewards/mean,run - response_length/mean"
CURVES = {REWARD: {1: 0.41, 2: 0.5}, LENGTH: {1: 1024.0, 2: 998.5}}
JSONL = '{"step": 1, "critic/rewards/mean": 0.41}\n{"step": 2, "critic/rewards/mean": 0.5}\n'
CONSOLE = "step:1 - critic/rewards/mean:0.41\nstep:2 - critic/rewards/mean:0.5\n"


def table(delimiter: str, *rows: str, end: str = "\n") -> str:
    return end.join([HEAD.replace(",", delimiter), *rows, ""])


# file name, content, what is read of it
READ: dict[str, tuple[str, str | bytes, dict[str, dict[int, float]]]] = {
    "`,` between the cells": ("x.csv", table(",", "1,0.41,1024", "2,0.5,998.5"), CURVES),
    "`;` between the cells": ("x.csv", table(";", "1;0.41;1024", "2;0.5;998.5"), CURVES),
    "tabs between the cells": ("x.tsv", table("\t", "1\t0.41\t1024", "2\t0.5\t998.5"), CURVES),
    "a suffix in capitals": ("x.CSV", table(",", "1,0.41,1024", "2,0.5,998.5"), CURVES),
    "spaces behind the delimiter": ("x.csv", table(", ", "1, 0.41, 1024", "2, 0.5, 998.5"), CURVES),
    "a first line `sep=;`": ("x.csv", "sep=;\r\n" + table(";", "1;0,41;1024", "2;0,5;998,5", end="\r\n"), CURVES),
    "a byte-order mark": ("x.csv", b"\xef\xbb\xbf" + table(",", "1,0.41,1024", "2,0.5,998.5").encode(), CURVES),
    "a byte-order mark in jsonl": ("x.jsonl", b"\xef\xbb\xbf" + JSONL.encode(), {REWARD: CURVES[REWARD]}),
    "a byte-order mark on a console's log": ("x.log", b"\xef\xbb\xbf" + CONSOLE.encode(), {REWARD: CURVES[REWARD]}),
    "UTF-16": ("x.csv", table("\t", "1\t0,41\t1.024,0", "2\t0,5\t998,5").encode("utf-16"), CURVES),
    "UTF-16 in jsonl": ("x.jsonl", JSONL.encode("utf-16"), {REWARD: CURVES[REWARD]}),
    "commas between thousands": ("x.csv", table(",", '1,0.41,"1,024"', "2,0.5,998.5"), CURVES),
    "commas between thousands and whole numbers": (
        "x.csv",
        'Step,run - response_length/mean\n"1","1,024"\n"1,000",998\n',
        {LENGTH: {1: 1024.0, 1000: 998.0}},
    ),
    "decimal commas": ("x.csv", table(",", '1,"0,41",1024', '2,"0,5","998,5"'), CURVES),
    "decimal commas and points between thousands": ("x.csv", table(";", "1;0,41;1.024", "2;0,5;998,5"), CURVES),
    "decimal commas with three places": ("x.csv", table(";", "1;0,41;1024,000", "2;0,500;998,5"), CURVES),
    "a small number between semicolons": ("x.csv", "Step;run - lr\n1;1.234e-06\n2;1e-06\n", {"lr": {1: 1.234e-6, 2: 1e-6}}),
    "a second column of steps": (
        "x.csv",
        "_step,global_step,run - critic/rewards/mean\n10,1,0.41\n20,2,0.5\n",
        {REWARD: CURVES[REWARD]},
    ),
    "a second name of steps in jsonl": (
        "x.jsonl",
        JSONL.replace('"step": ', '"_step": 7, "global_step": '),
        {REWARD: CURVES[REWARD]},
    ),
    "numpy's numbers": ("x.csv", table(",", "1,np.float64(0.41),1024", '2,"tensor(0.5, device=0)",998.5'), CURVES),
    "a minus sign of typography": (
        "x.csv",
        table(",", "1,\u22120.41,1024", "2,0.5,998.5"),
        {REWARD: {1: -0.41, 2: 0.5}, LENGTH: CURVES[LENGTH]},
    ),
    "empty cells": ("x.csv", table(",", "1,0.41,", "2,,998.5", "3,,"), {REWARD: {1: 0.41}, LENGTH: {2: 998.5}}),
    "words in a column": (
        "x.csv",
        "Step,run - critic/rewards/mean,run - state,run - day\n1,0.41,running,2026-01-02\n2,0.5,done,2026-01-03\n",
        {REWARD: CURVES[REWARD]},
    ),
}
# file name, content, what is read of it all the same
WARNED: dict[str, tuple[str, str, dict[str, dict[int, float]]]] = {
    "a number of two meanings": (
        "x.csv",
        table(",", '1,"0,41","1,024"', '2,"0,5","998,5"'),
        {REWARD: CURVES[REWARD], LENGTH: {2: 998.5}},
    ),
    "points and commas for decimals in one file": (
        "x.csv",
        table(";", "1;0,41;1.024", "2;0.5;998,5"),
        {REWARD: CURVES[REWARD], LENGTH: {2: 998.5}},
    ),
    **{
        name: ("x.csv", table(",", f"1,{text},1024", "2,0.5,998.5"), {REWARD: {2: 0.5}, LENGTH: CURVES[LENGTH]})
        for name, text in {
            "a number with its error": "0.44 ± 0.02",
            "a number with a mark": "0.5*",
            "a bound": "<0.01",
            "a fraction": "1/3",
            "a number with a unit": "12.3s",
            "underscores between thousands": "1_024",
        }.items()
    },
    "per cent": ("x.csv", table(",", "1,41%,1024", "2,0.5,998.5"), {REWARD: {2: 0.5}, LENGTH: CURVES[LENGTH]}),
    "a currency": ("x.csv", table(",", "1,$0.41,1024", "2,0.5,998.5"), {REWARD: {2: 0.5}, LENGTH: CURVES[LENGTH]}),
    "a number in brackets": ("x.csv", table(",", "1,(0.41),1024", "2,0.5,998.5"), {REWARD: {2: 0.5}, LENGTH: CURVES[LENGTH]}),
    "thousands as `k`": ("x.csv", table(",", "1,0.41,1.02k", "2,0.5,998.5"), {REWARD: CURVES[REWARD], LENGTH: {2: 998.5}}),
    "spaces between thousands": (
        "x.csv",
        table(",", "1,0.41,1\u202f024", "2,0.5,998.5"),
        {REWARD: CURVES[REWARD], LENGTH: {2: 998.5}},
    ),
    "a text with a comma in jsonl": (
        "x.jsonl",
        '{"step": 1, "critic/rewards/mean": "0,41"}\n{"step": 2, "critic/rewards/mean": "0.5"}\n',
        {REWARD: {2: 0.5}},
    ),
    "a number with a comma on a console": (
        "x.log",
        "step:1 - critic/rewards/mean:0,41 - response_length/mean:1,024\nstep:2 - critic/rewards/mean:0.5\n",
        {REWARD: {2: 0.5}},
    ),
    "more cells than columns": ("x.csv", table(",", "1,0,41,1024", "2,0.5,998.5"), {REWARD: {2: 0.5}, LENGTH: {2: 998.5}}),
    "fewer cells than columns": ("x.csv", table(",", "1,0.4", "2,0.5,998.5"), {REWARD: {2: 0.5}, LENGTH: {2: 998.5}}),
    "a step between two": ("x.csv", table(",", "1.5,0.41,1024", "2,0.5,998.5"), {REWARD: {2: 0.5}, LENGTH: {2: 998.5}}),
    "a step between two in jsonl": ("x.jsonl", JSONL.replace('"step": 1', '"step": 1.5'), {REWARD: {2: 0.5}}),
    "a step of 400 digits": ("x.jsonl", JSONL.replace('"step": 1', '"step": ' + "1" * 400), {REWARD: {2: 0.5}}),
    "a row of another step": ("x.jsonl", JSONL.replace('"step": 2', '"global_step": 2'), {REWARD: {2: 0.5}}),
    "a column twice": (
        "x.csv",
        HEAD + ",run - critic/rewards/mean\n1,0.41,1024,0.3\n2,0.5,998.5,0.5\n",
        {LENGTH: CURVES[LENGTH]},
    ),
}
EMPTY: dict[str, tuple[str, str | bytes]] = {
    "an empty file": ("x.csv", ""),
    "no column of steps": ("x.csv", "time,a - critic/rewards/mean,b - critic/rewards/mean\n1,0.41,0.5\n"),
    "an empty log": ("x.log", ""),
    "a cell without an end": ("x.csv", HEAD + '\n1,0.41,"' + "1024\n" * 40000),
    "another kind of file": ("x.wandb", "something else"),
    "none of the metrics that are drawn": ("x.csv", "Step,run - perf/mfu\n1,0.3\n2,0.4\n"),
}


def read(tmp_path: Path, name: str, content: str | bytes) -> Log:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (log,) = read_logs(path, verl=True)
    return log


@pytest.mark.parametrize("name", READ)
def test_read(name: str, tmp_path: Path) -> None:
    file, content, curves = READ[name]
    log = read(tmp_path, file, content)
    assert (log.series, log.messages) == (curves, [])
    assert ANSWERS[name] == "read"


@pytest.mark.parametrize("name", WARNED)
def test_read_but_for_what_is_told(name: str, tmp_path: Path) -> None:
    file, content, curves = WARNED[name]
    log = read(tmp_path, file, content)
    assert log.series == curves
    (message,) = log.messages
    assert is_answer(message, ANSWERS[name]), message


@pytest.mark.parametrize("name", EMPTY)
def test_a_named_log_that_gives_nothing_ends_with_1(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are drawn; each warning is printed once."""
    file, content = EMPTY[name]
    log = read(tmp_path, file, content)
    run = write_run(tmp_path / "run", [0.1, 0.2])
    out = tmp_path / "out"
    assert main([str(run), "--verl", str(log.path), "--metrics", "reward", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    warnings = [line.removeprefix("warning: ") for line in captured.err.splitlines() if line.startswith("warning: ")]
    assert len(set(warnings)) == len(warnings) and any(is_answer(line, ANSWERS[name]) for line in warnings), warnings
    assert "warning" not in captured.out and "wrote" in captured.out
    assert all(f"warning: {line}" in (out / "comparison.txt").read_text() for line in warnings)


def test_a_number_beyond_floats_is_infinite(tmp_path: Path) -> None:
    log = read(tmp_path, "x.jsonl", JSONL.replace("0.41", "1" * 400))
    assert (log.series, log.not_finite) == ({REWARD: {2: 0.5}}, {REWARD: {1}})


def test_every_row_is_tried() -> None:
    assert ANSWERS.keys() == READ.keys() | WARNED.keys() | EMPTY.keys()


def test_a_wide_table_is_read_in_every_format_alike(tmp_path: Path) -> None:
    """One run as jsonl, and as what a spreadsheet makes of its export in two languages."""
    values = {step: {"critic/rewards/mean": step / 7, "response_length/mean": 900.25 + 211 * step} for step in range(1, 30)}
    rows = [json.dumps({"step": step, **row}) for step, row in values.items()]
    right = read(tmp_path, "x.jsonl", "\n".join(rows) + "\n").series
    english = table(",", *(f'{s},{r["critic/rewards/mean"]!r},"{r["response_length/mean"]:,}"' for s, r in values.items()))
    assert read(tmp_path, "english.csv", english).series == right
    lines = [f"{s};{r['critic/rewards/mean']!r};{r['response_length/mean']:,}" for s, r in values.items()]
    swapped = [line.translate(str.maketrans(",.", ".,")) for line in lines]
    german = read(tmp_path, "german.csv", ("\ufeff" + table(";", *swapped, end="\r\n")).encode())
    assert (german.series, german.messages) == (right, [])
