"""Rollouts that go on from step to step, with played engines: nothing is lost, doubled or too old."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rstar2_megatron.cluster.calls import NoEngineLeft
from rstar2_megatron.cluster.phases.asynchronous import AsynchronousSource
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.rollout.dropped import TooManyDropped
from rstar2_megatron.rollout.phase import OpenGroup, Unfinished
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.schema import Settings
from rstar2_megatron.trajectory import FinishReason, Group, Problem, Trajectory, VersionSpan
from tests.cluster.played_engines import PlayedEngines, driver_channel

BATCH, SIZE = 2, 3
REJECTED = 4  # every fourth problem
SECONDS = {"step": 4.0, "rollout": 1.0}


class Loader:
    def __init__(self, count: int = 1000) -> None:
        self.taken = 0
        self.count = count

    def take(self, count: int) -> list[Problem]:
        if self.taken + count > self.count:
            raise DataError("the epochs are used up")
        first, self.taken = self.taken, self.taken + count
        return [Problem(str(n), [], []) for n in range(first, first + count)]


@pytest.fixture
def settings() -> Settings:
    settings = load_settings("rstar2-tiny-cpu", ["algorithm.max_staleness=1"])
    settings.data.rollout_batch_size, settings.algorithm.group_size = BATCH, SIZE
    settings.runner.step_timeout_s, settings.runner.max_steps = 20.0, 1000
    return settings


def rollout(settings: Settings, engines: PlayedEngines) -> AsynchronousSource:
    tokens: Any = SimpleNamespace(fetch=engines.fetch, fetch_complete=lambda groups: None)

    def is_rejected(group: Group) -> bool:
        return not group.usable or int(group.problem.query_id) % REJECTED == 0

    return AsynchronousSource(driver_channel(engines), tokens, settings, is_rejected)


def steps(
    run: AsynchronousSource, engines: PlayedEngines, loader: Any, first: int, last: int, bound: int
) -> Iterator[tuple[int, list[Group]]]:
    """Train steps first .. last. What the trainer does beside the engines is left out."""
    for step in range(first, last + 1):
        groups = run.next(step, loader)
        kept = [g for g in groups if g.usable and int(g.problem.query_id) % REJECTED]
        assert len(kept) == BATCH
        for t in (t for g in kept for t in g.trajectories):
            assert t.oldest_version is not None and step - 1 - bound <= t.oldest_version <= step - 1
        yield step, groups
        engines.version = step
        run.new_weights(step)


def ids(groups: list[Group]) -> list[int]:
    return [int(g.problem.query_id) for g in groups]


def four_steps(run: AsynchronousSource, engines: PlayedEngines) -> Iterator[int]:
    """Steps 1 to 4, the last ones of the run; at their end each problem was trained once, and whole."""
    loader: Any = Loader()
    seen: list[int] = []
    for step, groups in steps(run, engines, loader, 1, 4, 1):
        seen += ids(groups)
        assert all(t.usable for group in groups for t in group.trajectories)
        yield step
    run.close()
    assert sorted(seen) == list(range(loader.taken))


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_batch_is_full_and_every_problem_trained_once(settings: Settings, bound: int, shuffled: bool) -> None:
    """With a pause after every third step, as for a checkpoint; the last step leaves nothing behind."""
    settings.algorithm.max_staleness, settings.runner.max_steps = bound, 12
    engines, loader = PlayedEngines(shuffled=shuffled), Loader()
    run = rollout(settings, engines)
    seen: list[int] = []
    counted = 0.0
    for step, groups in steps(run, engines, loader, 1, 12, bound):
        seen += ids(groups)
        assert all(len(g.trajectories) == SIZE for g in groups)
        if step % 3 == 0:
            run.pause()
        stats = run.stats(SECONDS)
        counted += stats["generated_tokens"]
        assert stats["dropped_stale"] == 0 and stats["buffer_groups"] <= (bound + 1) * BATCH
        assert stats["trainer_idle_seconds"] == 1.0 and 0 <= stats["engine_idle_seconds"] <= 2 * 4.0
    run.close()
    assert sorted(seen) == list(range(loader.taken))
    assert counted >= SIZE * len(seen)  # a parked trajectory is sent twice


@pytest.mark.parametrize("known", [True, False], ids=["known", "found when its tokens are asked for"])
def test_what_a_worker_held_that_died_before_a_pause_is_rolled_out_again(settings: Settings, known: bool) -> None:
    """The worker dies when no thread looks any more, as in a weight sync. Its groups of the buffer are open again."""
    engines = PlayedEngines(shuffled=False)
    engines.hold = True
    settings.runner.max_steps = 4
    run = rollout(settings, engines)
    for step in four_steps(run, engines):
        if step == 1:
            deadline = time.monotonic() + 20
            while not run._buffer and time.monotonic() < deadline:
                time.sleep(0.01)
            run._stop_thread()
            (first, *_) = (t.held for g in run._buffer.values() for t in g.trajectories if t.held)
            engines.kill(first.worker)
            if known:
                engines.lose(first.worker, "it died")
            run.pause()
            assert run.stats(SECONDS)["workers_lost"] == 1


def test_no_batch_holds_tokens_of_a_worker_whose_death_is_known(settings: Settings) -> None:
    """Another call than the thread's, which looks once a second, has found it dead."""
    engines, loader = PlayedEngines(shuffled=False), Loader()
    engines.hold = True
    run = rollout(settings, engines)
    for step, groups in steps(run, engines, loader, 1, 3, 1):
        engines.fetch(t for g in groups if int(g.problem.query_id) % REJECTED for t in g.trajectories)
        if step == 1:
            deadline = time.monotonic() + 20
            while run.schedule.num_complete < BATCH and time.monotonic() < deadline:
                time.sleep(0.01)
            assert run._server is not None
            run._server._checked = math.inf
            engines.kill(0)
            engines.lose(0, "it died")
    run.close()


def test_a_pause_outlives_the_last_worker(settings: Settings) -> None:
    """Both die while the actor trains, which ends the rollout's thread. The sync that follows starts them again."""
    engines = PlayedEngines(shuffled=False)
    engines.hold = True
    settings.runner.max_steps = 4
    run = rollout(settings, engines)
    for step in four_steps(run, engines):
        if step == 2:
            for engine in (0, 1):
                engines.kill(engine)
                engines.lose(engine, "it died")
            deadline = time.monotonic() + 20
            while run._failure is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert isinstance(run._failure, NoEngineLeft) and run.engines_gone
            run.pause()
            engines.dead.clear()
            engines.lost.clear()


def test_a_resumed_run_goes_on_with_what_was_not_trained_on(settings: Settings) -> None:
    """The state of step 3 is pickled as a checkpoint is; the first run goes on and is forgotten, as by a kill."""
    engines, loader = PlayedEngines(shuffled=True), Loader()
    run = rollout(settings, engines)
    seen: list[int] = []
    saved: Unfinished | None = None
    position = 0
    for step, groups in steps(run, engines, loader, 1, 5, 1):
        if step <= 3:
            seen += ids(groups)
        if step == 3:
            saved, position = copy.deepcopy(run.state())["unfinished"], loader.taken
    run.close()
    assert saved is not None and saved.complete + saved.open
    half = [t for group in saved.open for t in group.parked.values()]
    tokens = {(t.query_id, t.rollout_index): t.response_ids.tolist() for t in half}

    again, more = PlayedEngines(shuffled=True), Loader()
    more.taken, again.version = position, 3
    settings.runner.max_steps = 9
    resumed = rollout(settings, again)
    resumed.restore({"unfinished": saved}, version=3)
    for _, groups in steps(resumed, again, more, 4, 9, 1):
        seen += ids(groups)
        for t in (t for g in groups for t in g.trajectories):
            before = tokens.get((t.query_id, t.rollout_index), [])
            assert t.response_ids.tolist()[: len(before)] == before
    resumed.close()
    assert sorted(seen) == list(range(more.taken))


def test_what_a_smaller_bound_forbids_is_dropped_counted_and_rolled_out_again(settings: Settings) -> None:
    def ended(version: int, index: int) -> Trajectory:
        spans = [VersionSpan(0, 1, version)]
        t = Trajectory("1", index, [1], [5], [1], [-0.5], spans, finish_reason=FinishReason.ANSWERED)
        t.reward = 1.0
        return t

    old = Group(Problem("1", [], []), [ended(2, i) for i in range(SIZE)])
    half = OpenGroup(Problem("2", [], []), SIZE, {0: ended(2, 0), 1: ended(4, 1)})
    engines, loader = PlayedEngines(shuffled=False), Loader()
    loader.taken, engines.version = 3, 5
    run = rollout(settings, engines)
    run.restore({"unfinished": Unfinished(open=[half], complete=[old])}, version=5)
    ((_, groups),) = steps(run, engines, loader, 6, 6, 1)
    stats = run.stats(SECONDS)
    run.close()
    assert stats["dropped_stale"] == SIZE + 1 and half.ended[1].version_spans == [VersionSpan(0, 1, 4)]
    assert {1, 2} <= set(ids(groups))


def test_problems_that_are_used_up_end_the_run_when_no_batch_can_follow(settings: Settings) -> None:
    engines, loader = PlayedEngines(shuffled=False), Loader(count=6)  # two of them are rejected
    run = rollout(settings, engines)
    with pytest.raises(DataError, match="used up"):
        for step, _ in steps(run, engines, loader, 1, 3, 1):
            assert step <= 2
    run.close()


def test_a_judge_that_stays_away_ends_the_wait(settings: Settings) -> None:
    """Every trajectory is spoiled, so every group is rejected and replaced: no batch would ever be full."""
    engines = PlayedEngines(shuffled=True)
    engines.away = itertools.repeat(True)
    run = rollout(settings, engines)
    with pytest.raises(TooManyDropped, match=r"of the step's 6 trajectories were lost .* of them: no judge"):
        run.next(1, Loader())  # type: ignore[arg-type]
    run.close()


def test_a_judge_that_comes_back_ends_nothing(settings: Settings) -> None:
    """Whole groups are lost, fewer than would spoil a step, and replaced."""
    settings.rollout.max_dropped_share = 0.7
    engines, loader = PlayedEngines(shuffled=False), Loader()
    engines.away = itertools.chain([True] * SIZE, itertools.repeat(False, 4 * SIZE), [True] * SIZE, itertools.repeat(False))
    run = rollout(settings, engines)
    spoiled = [g for _, groups in steps(run, engines, loader, 1, 4, 1) for g in groups if not g.usable]
    run.close()
    assert len(spoiled) == 2


def test_a_failure_in_the_thread_ends_the_wait(settings: Settings) -> None:
    engines = PlayedEngines(shuffled=False)
    run = rollout(settings, engines)

    def fail(timeout_s: float) -> Any:
        raise RuntimeError("the channel is gone")

    run._channel.inbox = SimpleNamespace(poll=fail)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="the channel is gone"):
        run.next(1, Loader())  # type: ignore[arg-type]
    run.close()
