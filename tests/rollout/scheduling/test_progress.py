"""Progress of a phase and its estimate of the time left, on numbers that are known by hand."""

from __future__ import annotations

import io

import pytest

from rstar2_megatron.rollout import live_view
from rstar2_megatron.rollout.live_view import StatusLine
from rstar2_megatron.rollout.phase import RolloutPhase
from rstar2_megatron.rollout.progress import EngineLoad, PhaseProgress, Progress, count, duration
from rstar2_megatron.rollout.scheduling.length_estimate import LengthSurvival
from rstar2_megatron.rollout.scheduling.work_queue import WorkQueue
from rstar2_megatron.trajectory import Problem


def load(engine: int, tokens: int, *running: int, waiting: int = 0) -> EngineLoad:
    return EngineLoad(engine, tokens, list(running), waiting, 1, 10, 100)


def test_without_data_a_trajectory_is_expected_to_reach_the_maximum() -> None:
    survival = LengthSurvival(640, num_bins=64)
    survival.refresh([])
    assert survival.expected_left(0) == pytest.approx(640)
    assert survival.expected_left(635) == pytest.approx(5)


def test_the_expected_rest_follows_the_ended_lengths() -> None:
    survival = LengthSurvival(1000, num_bins=100)
    for i in range(4000):
        survival.add(200 if i % 2 else 600)
    survival.refresh([])
    assert survival.expected_left(0) == pytest.approx(400, rel=0.08)
    assert survival.expected_left(300) == pytest.approx(300, rel=0.08)  # those that passed 200 reach 600


def test_speed_and_time_left() -> None:
    progress = PhaseProgress("step 3 rollout", LengthSurvival(1000, num_bins=100))
    first = progress.at(100.0, 0, 4, 2, [load(0, 0)])
    assert first.tokens_per_second == 0 and first.seconds_left is None
    now = progress.at(110.0, 1, 4, 1, [load(0, 3000, 250, waiting=1), load(1, 2000)])
    assert now.tokens_per_second == 500
    # one trajectory has 750 tokens ahead, one waits at an engine and one in the queue: 2750 tokens at 500/s
    assert now.seconds_left == pytest.approx(5.5)
    text = "step 3 rollout: 1/4 groups, 5k tokens, 500/s, 1 running, 2 calls in flight, about 6 s left"
    assert str(now) == text


def test_the_speed_is_that_of_the_last_seconds() -> None:
    progress = PhaseProgress("", LengthSurvival(1000))
    for second in range(100):
        now = progress.at(float(second), 0, 1, 0, [load(0, 100 * min(second, 50))])
    assert now.tokens_per_second == 0 and now.seconds_left is None


def test_numbers_for_people() -> None:
    assert [count(n) for n in (7, 1200, 3_400_000, 2e9)] == ["7", "1.2k", "3.4M", "2G"]
    assert [duration(s) for s in (7, 90, 7200)] == ["7 s", "1.5 min", "2.0 h"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_and_a_file_one_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view.time, "monotonic", lambda: 0.0)
    terminal = Terminal()
    line = StatusLine(terminal)
    line.show("a long text", 0.0)
    line.show("short", 1.0)
    assert terminal.getvalue() == "\ra long text\rshort      "
    line.clear()
    assert terminal.getvalue().endswith("\r     \r")
    file = io.StringIO()
    line = StatusLine(file)
    for second in range(121):
        line.show(f"{second}", float(second))
    line.clear()
    assert file.getvalue() == "60\n120\n"


def test_a_progress_counts_over_engines() -> None:
    progress = Progress("", 0, 1, 0, 0.0, None, [load(0, 0, 1, 2), load(1, 0, 3)])
    assert progress.running == 3 and progress.tool_calls == 2


def test_the_view_asks_and_never_waits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that is not answered yet, one that is, one whose worker died."""
    answers: list[list[EngineLoad | None] | Exception | None] = [None, [load(0, 70, 7), None], RuntimeError("gone")]
    asked: list[int] = []
    clock = 0.0
    monkeypatch.setattr(live_view.time, "monotonic", lambda: clock)

    class Asked:
        def result_if_ended(self) -> list[EngineLoad | None] | None:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    def ask() -> Asked:
        asked.append(round(clock))
        return Asked()

    phase = RolloutPhase(WorkQueue("kv_adaptive", 1, 2), group_size=2)
    phase.add_problems([Problem("a", [], []), Problem("b", [], [])])
    seen: list[Progress] = []
    view = live_view.LiveView(ask, phase, PhaseProgress("step 1", LengthSurvival(100)), seen.append)
    while answers:
        clock += 0.1
        view.poll()
    view.close()
    assert asked == [2, 4] and len(seen) == 2
    assert (seen[0].groups_done, seen[0].groups, seen[0].tokens, seen[0].running) == (0, 2, 70, 1)
    assert (seen[1].tokens, seen[1].tokens_per_second, seen[1].running) == (70, 0, 0), "the phase has ended"
