"""The file of samples: what a stopped evaluation leaves and what the next one makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rstar2_megatron.evaluation.samples import SampleFile, SamplesError, count_late, try_row
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.trajectory import FinishReason, Trajectory
from tests.evaluation.rows import problem, row

IDENTITY = {"model": "/m", "sampling": {"temperature": 0.6}}


def test_only_usable_samples_of_these_problems_count(tmp_path: Path) -> None:
    path = tmp_path / "out" / "t.jsonl"
    file = SampleFile(path, IDENTITY)
    assert file.open([problem("q")]) == {}
    file.append(row("q", 1))
    file.append(row("q", 0, finish_reason="infrastructure", reward=None))
    file.append(row("q", 2, finish_reason="cut", reward=None))
    file.append(row("elsewhere", 0))
    found = SampleFile(path, IDENTITY).open([problem("q")])
    assert list(found) == [("q", 1)] and found["q", 1].reward == 1.0
    file.append(row("q", 0, reward=0.0))  # the spoiled one, tried again
    assert sorted(SampleFile(path, IDENTITY).open([problem("q")])) == [("q", 0), ("q", 1)]


@pytest.mark.parametrize(
    ("finish", "seconds", "late"),
    [
        (FinishReason.INFRASTRUCTURE, 300.2, True),
        (FinishReason.INFRASTRUCTURE, 12.0, False),  # an engine was lost
        (FinishReason.ANSWERED, 300.2, False),
    ],
)
def test_tries_that_the_deadline_ended_are_counted(finish: FinishReason, seconds: float, late: bool, tmp_path: Path) -> None:
    """In their place stand shorter ones, so that they cannot be seen in the scores."""
    trajectory = Trajectory("q", 0)
    trajectory.finish_reason, trajectory.seconds = finish, seconds
    line = try_row(problem("q"), trajectory, 300.0)
    assert ("late" in line) is late
    write_jsonl(tmp_path / "t.jsonl", [line, row("q", 0), line, {**line, "query_id": "elsewhere"}])
    assert count_late(tmp_path / "t.jsonl", {"q"}) == 2 * late


def test_a_line_cut_by_a_kill_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    file = SampleFile(path, IDENTITY)
    file.open([])
    file.append(row("q", 0))
    whole = path.read_bytes()
    with path.open("ab") as raw:
        raw.write(json.dumps(row("q", 1)).encode()[:-20])
    again = SampleFile(path, IDENTITY)
    assert list(again.open([problem("q")])) == [("q", 0)]
    assert path.read_bytes() == whole
    again.append(row("q", 1))
    assert len(SampleFile(path, IDENTITY).open([problem("q")])) == 2


def test_another_model_or_sampling_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    first = SampleFile(path, IDENTITY)
    first.open([])
    first.append(row())
    with pytest.raises(SamplesError, match=r"sampling: \{'temperature': 0.6\} then, \{'temperature': 1.0\} now"):
        SampleFile(path, IDENTITY | {"sampling": {"temperature": 1.0}}).open([problem("q")])
    first.path.with_name(first.path.name + ".settings.json").unlink()
    with pytest.raises(SamplesError, match="cannot be read"):
        SampleFile(path, IDENTITY).open([problem("q")])


def test_another_problem_of_the_same_id_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    file = SampleFile(path, IDENTITY)
    file.open([])
    file.append(row())
    with pytest.raises(SamplesError, match="another problem under query_id 'q'"):
        SampleFile(path, IDENTITY).open([problem("q", "3+3?")])


def test_foreign_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    file = SampleFile(path, IDENTITY)
    file.open([])
    file.append({"query_id": "q", "prompt": row()["prompt"], "solutions": ["4"]})
    with pytest.raises(SamplesError, match="lacks 'tool_calls'"):
        SampleFile(path, IDENTITY).open([problem("q")])
    path.write_text("not json\n")
    with pytest.raises(SamplesError, match=r"t\.jsonl:1: not JSON"):
        SampleFile(path, IDENTITY).open([])
