"""What bounds a step, on made-up events whose answer is known by hand; the picture of a complete and of a killed trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rstar2_megatron.records.trace import CHECKPOINT, DRIVER, GRADING, SYNC, TOOLS, Event, TraceRow, actor_row, engine_row
from rstar2_megatron.report.step_bound import (
    GRADING_WAIT,
    Span,
    bound_sentence,
    busiest,
    kv_use,
    shares_of,
    tail_tasks,
    timeline,
)
from rstar2_megatron.report.timeline import main
from tests.small_disk import files_of_at_most


def span(row: TraceRow, name: str, start: float, end: float, lane: int = 0) -> Event:
    times = {"ts": round(start * 1e6), "dur": round((end - start) * 1e6)}
    return {"name": name, "ph": "X", "pid": row.pid, "tid": lane, "args": {}, **times}


def task(engine: int, lane: int, start: float, end: float | None) -> list[Event]:
    where = {"pid": engine_row(engine).pid, "tid": lane, "args": {}}
    begun = {"name": f"p{lane}#{engine}", "ph": "B", "ts": round(start * 1e6), **where}
    return [begun] if end is None else [begun, {"ph": "E", "ts": round(end * 1e6), **where}]


def step(rollout: float, training: float, sync: float, save: float, tail: float, grading: float) -> list[Event]:
    """The driver's parts of a step of 100 s."""
    events = [span(DRIVER, "step 3", 0, 100), span(DRIVER, "rollout", 0, rollout)]
    events.append(span(DRIVER, "tail", rollout - tail, rollout))
    events.append(span(DRIVER, GRADING_WAIT, rollout - grading, rollout))
    at = rollout
    for row, name, seconds in ((DRIVER, "training", training), (CHECKPOINT, "save", save), (SYNC, "sync_weights", sync)):
        events.append(span(row, name, at, at + seconds))
        at += seconds
    return events


def test_a_tail_names_its_trajectories_and_their_engine() -> None:
    events = step(rollout=70, training=20, sync=5, save=0, tail=40, grading=0)
    for lane in range(1, 4):
        events += task(2, lane, 5, 66 + lane)
    events += task(0, 1, 0, 40) + task(1, 1, 0, 49)  # they end before the last quarter of the tail (30 to 70 s)
    found = timeline(events)
    assert bound_sentence(found) == "rollout tail: 40% of the step on 3 trajectories of engine 2"
    assert [t.name for t in tail_tasks(found)] == ["p1#2", "p2#2", "p3#2"]
    assert shares_of(found) == pytest.approx(
        {"rollout": 0.3, "tail": 0.4, "grading": 0, "training": 0.2, "sync": 0.05, "checkpoint": 0, "other": 0.05}
    )
    both = timeline(events + task(1, 2, 0, 70))
    assert bound_sentence(both) == "rollout tail: 40% of the step on 4 trajectories of 2 engines"


def test_a_rollout_says_what_its_trajectories_did() -> None:
    events = step(rollout=80, training=10, sync=5, save=0, tail=10, grading=0)
    events += task(0, 1, 0, 80)
    events += [span(engine_row(0), "generate", 0, 40, 1), span(TOOLS, "run", 40, 60, 1)]
    for at, used in ((1, 50), (2, 30), (3, 0)):  # a report without tokens is one without trajectories
        args = {"used": used, "capacity": 100}
        events.append({"name": "KV tokens", "ph": "C", "pid": engine_row(0).pid, "ts": at * 10**6, "args": args})
    found = timeline(events)
    assert kv_use(found, engine_row(0).pid) == pytest.approx(0.4)
    expected = "rollout: 70% of the step, 50% of it generating and 25% in tool calls, KV cache 40% full"
    assert bound_sentence(found) == expected


def test_other_bounds() -> None:
    events = step(rollout=30, training=50, sync=5, save=5, tail=5, grading=0)
    events += [span(actor_row(0), "train_step", 30, 60), span(actor_row(1), "train_step", 30, 80)]
    text = "training: 50% of the step on 2 actor ranks (rank 1 took 50.0 s, the quickest 30.0 s)"
    assert bound_sentence(timeline(events)) == text
    events = [*step(60, 5, 2, 2, tail=50, grading=45), span(GRADING, "grade", 10, 55)]
    expected = "grading: 45% of the step after the last token, the slowest message took 45.0 s"
    assert bound_sentence(timeline(events)) == expected
    events = [*step(10, 10, 60, 5, tail=0, grading=0), span(actor_row(0), "send_weights", 25, 85)]
    assert bound_sentence(timeline(events)) == "weight sync: 60% of the step, 1 actor rank sent"
    assert bound_sentence(timeline(step(10, 10, 5, 60, 0, 0))).startswith("checkpoint: 60% of the step")
    assert bound_sentence(timeline(step(10, 10, 5, 5, 0, 0))) == "the driver's own work: 70% of the step"


def test_a_killed_step_says_how_far_it_came() -> None:
    events = [*task(0, 1, 0, 3), *task(0, 2, 1, None), span(engine_row(0), "generate", 2, 9, 1)]
    found = timeline(events)
    assert found.tasks[1].end == 9 and not found.tasks[1].complete
    assert bound_sentence(found) == "the step did not end: 1 trajectory was running when the trace stops"


def test_running_spans_are_counted_by_time() -> None:
    spans = [Span(5, 1, "a", 0.0, 2.0), Span(5, 2, "b", 1.0, 1.5)]
    assert busiest(spans, 4.0, 4) == pytest.approx([1.0, 1.5, 0.0, 0.0])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_program_draws_and_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    events = step(70, 20, 5, 0, tail=40, grading=1) + task(0, 1, 0, 69) + [span(TOOLS, "run", 1, 2, 1)]
    file = tmp_path / "traces" / "step_3.json"
    file.parent.mkdir()
    file.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in events) + '{"ph": "X", "na')
    target = tmp_path / f"picture{suffix}"
    assert main([str(tmp_path), "--out", str(target)]) == 0
    output = capsys.readouterr().out
    assert "rollout tail: 39% of the step on 1 trajectory of engine 0" in output and "ui.perfetto.dev" in output
    head = target.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in head


def test_a_picture_that_cannot_be_written_is_no_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_3.json").write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in step(70, 20, 5, 0, 40, 1)))
    with files_of_at_most(1000):
        assert main([str(tmp_path / "step_3.json")]) == 1
    assert "File too large" in capsys.readouterr().err


def test_a_run_without_traces_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2 and "train with runner.trace=N" in capsys.readouterr().err
    assert main([str(tmp_path), "--step", "4"]) == 2 and "step_4.json" in capsys.readouterr().err
    assert main([str(tmp_path / "gone")]) == 2 and "gone is not there; give the directory of a run" in capsys.readouterr().err
