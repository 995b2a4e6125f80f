"""Counters of engines, split into steps."""

from __future__ import annotations

import time

import pytest

from rstar2_megatron.rollout.stats import RolloutStats, StatsByStep, combine


def test_a_step_has_the_growth_of_its_counters_also_when_a_phase_ends_in_it() -> None:
    steps = StatsByStep()
    assert steps.step_ended({0: {"tokens": 5.0}, 1: {"tokens": 7.0}}) == [
        {"tokens": 5.0, "engine_restarts": 0.0},
        {"tokens": 7.0, "engine_restarts": 0.0},
    ]
    steps.phase_ended({0: {"tokens": 9.0}, 1: {"tokens": 7.0}})
    # the next phase begins from nothing, without engine 1; engine 0 has been started again in this run
    after = steps.step_ended({0: {"tokens": 2.0, "engine_restarts": 1.0}})
    assert after == [{"tokens": 6.0, "engine_restarts": 1.0}, {"tokens": 0.0, "engine_restarts": 0.0}]
    assert steps.step_ended({0: {"tokens": 3.0, "engine_restarts": 1.0}}) == [{"tokens": 1.0, "engine_restarts": 1.0}]


def test_an_engine_that_is_busy_has_been_busy_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    stats = RolloutStats()
    assert stats.sums()["engine_busy_seconds"] == 0
    with stats.at_engine():
        clock += 5.0
        assert stats.sums()["engine_busy_seconds"] == 5.0
    clock += 5.0
    assert stats.sums()["engine_busy_seconds"] == 5.0
    assert combine([stats.sums()], 10.0)["idle_share"] == 0.5
