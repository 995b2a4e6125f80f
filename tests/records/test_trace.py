"""The trace file: what several processes write, what a kill leaves, clocks."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest

from rstar2_megatron.records.step_shares import SHARES, step_shares
from rstar2_megatron.records.trace import DRIVER, TOOLS, Recorder, clock_offset, engine_row, read_trace


def test_nothing_is_written_while_no_trace_is_open() -> None:
    recorder = Recorder()
    with recorder.span("a") as note, recorder.task("b"):
        note["tokens"] = 1
    recorder.add("c", 0.0, 1.0)
    recorder.counter("d", x=1)
    assert not recorder.on


async def test_concurrent_tasks_get_lanes_and_hold_their_spans(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "step_1.json"
    driver, engine = Recorder(), Recorder()
    driver.open(path, time.time())
    engine.open(path, time.time(), engine_row(2), index=2)

    async def trajectory(name: str) -> None:
        with engine.task(name) as task:
            with engine.span("generate"):
                await asyncio.sleep(0.01)
            with engine.span("run_code", TOOLS):
                await asyncio.sleep(0.01)
            task["tokens"] = 7

    await asyncio.gather(trajectory("p#0"), trajectory("p#1"))
    await trajectory("p#2")  # takes the lane that became free
    engine.close()
    now = time.monotonic()
    driver.add("rollout", now - 0.02, now)
    driver.close()
    events = json.loads(path.read_text())  # a complete file is plain JSON
    assert events == read_trace(path)
    begun = {e["name"]: e["tid"] for e in events if e["ph"] == "B"}
    assert sorted(begun.values()) == [1, 1, 2] and begun["p#2"] == 1
    inside = [e["tid"] for e in events if e.get("name") == "generate"]
    assert sorted(inside) == [1, 1, 2] and {e["args"]["tokens"] for e in events if e["ph"] == "E"} == {7}
    tools = [e["tid"] for e in events if e.get("name") == "run_code"]
    assert sorted(tools) == [2001, 2001, 2002]  # the lanes of engine 2 in the row of all tool calls
    (rollout,) = [e for e in events if e.get("name") == "rollout"]
    assert rollout["pid"] == DRIVER.pid and rollout["dur"] >= 20_000


def test_spans_that_follow_each_other_touch(tmp_path: Path) -> None:
    """Perfetto drops a span that begins before its predecessor in the lane has ended, if by a microsecond only."""
    recorder = Recorder()
    recorder.open(tmp_path / "step_1.json", time.time())
    with recorder.span("step 1"):
        last = time.monotonic()
        for _ in range(1000):
            now = time.monotonic()
            recorder.add("part", last, now)
            last = now
    recorder.close()
    *parts, whole = [e for e in read_trace(tmp_path / "step_1.json") if e["ph"] == "X"]
    for before, after in itertools.pairwise(parts):
        assert before["ts"] + before["dur"] == after["ts"]
    assert whole["ts"] <= parts[0]["ts"] and parts[-1]["ts"] + parts[-1]["dur"] <= whole["ts"] + whole["dur"]


def _write_for_ever(path: Path, rank: int) -> None:
    recorder = Recorder()
    recorder.open(path, time.time(), engine_row(rank))
    while True:
        with recorder.span("x" * 200):
            recorder.flush()


def test_a_kill_of_the_writers_leaves_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "step_1.json"
    driver = Recorder()
    driver.open(path, time.time())
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_for_ever, args=(path, rank)) for rank in range(3)]
    for writer in writers:
        writer.start()
    # On a busy machine one process may write all of this before another starts.
    pids = {engine_row(rank).pid for rank in range(3)}
    missing, deadline = pids, time.monotonic() + 60
    while (missing or path.stat().st_size < 300_000) and time.monotonic() < deadline:
        time.sleep(0.05)
        written = path.read_text()
        missing = {pid for pid in missing if not re.search(rf'"ph": ?"X".*"pid": ?{pid}\b', written)}
    for writer in writers:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    text = path.read_text()
    assert not text.rstrip().endswith("]")
    path.write_text(text + '{"name": "torn", "ph"')  # what a kill within a write leaves
    events = read_trace(path)
    assert len(events) >= text.count("\n") - 2  # lines of several processes never mix
    assert {e["pid"] for e in events if e["ph"] == "X"} == pids


def test_a_file_without_events_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step_1.json").write_text("[\n")
    with pytest.raises(ValueError, match=r"no trace events; runner\.trace=N"):
        read_trace(tmp_path / "step_1.json")


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step_1.json"
    path.symlink_to("/dev/full")
    recorder = Recorder()
    recorder.open(path, time.time(), engine_row(0))
    with recorder.span("a"):
        recorder.flush()
    recorder.close()
    assert not recorder.on and "the trace of this step ends here" in caplog.text


def test_the_offset_of_a_clock_is_that_of_the_quickest_ping() -> None:
    slow, quick = (10.0, 113.0, 14.0), (20.0, 120.5, 20.2)
    assert clock_offset([slow, quick]) == pytest.approx(100.4)


def test_events_of_a_clock_that_is_ahead_are_moved_back(tmp_path: Path) -> None:
    path, recorder = tmp_path / "step_1.json", Recorder()
    recorder.open(path, time.time() - 5, engine_row(0), offset_s=5.0)
    recorder.counter("KV tokens", used=1)
    recorder.close()
    (event,) = [e for e in read_trace(path) if e["ph"] == "C"]
    assert 0 <= event["ts"] < 1_000_000


def test_shares_of_a_step_add_up_to_one() -> None:
    seconds = {"step": 100.0, "rollout": 60.0, "training": 20.0, "sync_weights": 5.0, "save": 2.0, "checkpoint": 1.0}
    shares = step_shares(seconds, tail_s=25.0, grading_s=5.0)
    assert tuple(shares) == SHARES
    assert [round(100 * share) for share in shares.values()] == [35, 20, 5, 20, 5, 3, 12]
    assert step_shares({}) == {}
    assert step_shares({"step": 10.0, "rollout": 2.0}, tail_s=9.0, grading_s=9.0)["grading"] == 0.2
