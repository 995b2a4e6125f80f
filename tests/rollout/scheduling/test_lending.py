"""The simulated run whose idle actor GPUs are lent: nothing is lost, twice or too old, and what is lent comes back."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.rollout.asynchronous import Actor, enough
from benchmarks.rollout.lending import LendingSimulator
from benchmarks.rollout.simulator import Cluster
from benchmarks.rollout.traces import Shape
from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.settings.planning.estimates import EngineSpeed

SPEED = EngineSpeed(0.01, 1e-4, 1e-7, 0.01, 1e-5)
SHAPE = Shape(4, 8, 2000, 500, 0.8)


def simulated(bound: int, kv_tokens: int, resume_s: float) -> LendingSimulator:
    model = known_model("Qwen2.5-1.5B")
    assert model is not None
    simulator = LendingSimulator(
        enough(SHAPE, 5, bound),
        Cluster(4, SPEED, kv_tokens, 64),
        4,
        Actor(model, 4),
        SHAPE,
        bound,
        5,
        standing=2,
        resume_s=resume_s,
    )
    simulator.simulate()
    return simulator


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("kv_tokens", [4_000, 20_000])
def test_every_trajectory_is_in_one_place_and_none_is_too_old(bound: int, kv_tokens: int) -> None:
    simulator = simulated(bound, kv_tokens, resume_s=0.5)
    assert simulator.switches > 0 and simulator.moved > 0
    assert len(simulator.trained_at) == 5 and max(simulator.ages) <= bound
    places = Counter(key for engine in simulator.engines for key in engine.lives)
    assert set(places.values()) <= {1}
    if not simulator.lending:
        assert not any(engine.lives for engine in simulator.lent)


def test_nothing_is_lent_where_the_switch_takes_longer_than_it_saves() -> None:
    simulator = simulated(1, 20_000, resume_s=1e4)
    assert simulator.switches == simulator.moved == 0 and len(simulator.trained_at) == 5


def test_lending_shortens_the_steps_that_wait_for_full_caches() -> None:
    assert simulated(1, 4_000, resume_s=0.1).trained_at[-1] < simulated(1, 4_000, resume_s=1e4).trained_at[-1]
