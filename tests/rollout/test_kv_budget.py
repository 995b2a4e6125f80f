"""Admission: never over budget, nobody starves, everything is given back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_megatron.rollout.kv_budget import POLICIES, AdaptiveBudget, KVBudget, make_budget
from rstar2_megatron.rollout.length_estimate import RemainingLength

TRAJECTORIES = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 140), st.floats(0.01, 1.0)), min_size=1, max_size=40
)


def run_all(
    budget: KVBudget, work: list[tuple[int, int, float]], seed: int, group_size: int = 4
) -> list[int]:
    """A toy engine: admits in order, lets running trajectories grow by random steps, ends them at their length.

    Returns reserved tokens after each admission. Every trajectory must end.
    """
    rng = random.Random(seed)
    waiting = []
    for i, (prompt, response, share) in enumerate(work):
        group = i // group_size
        prompt = work[group * group_size][0]  # one prompt a group
        waiting.append((i, group, prompt, prompt + response, prompt + max(1, round(response * share))))
    running: dict[int, tuple[int, int]] = {}
    reserved = []
    ended = 0
    while waiting or running:
        while waiting:
            key, group, prompt, longest, final = waiting[0]
            if not budget.try_admit(key, group, prompt, longest):
                break
            waiting.pop(0)
            running[key] = (prompt, final)
            reserved.append(budget.reserved_tokens)
        assert running, "nothing runs and nothing is admitted: the queue is stuck"
        key = rng.choice(sorted(running))
        length, final = running[key]
        length = min(final, length + rng.randint(1, 30))
        budget.settle(key, length)
        running[key] = (length, final)
        if length == final:
            del running[key]
            budget.release(key)
            ended += 1
    assert ended == len(work)
    return reserved


@settings(max_examples=60, deadline=None)
@given(work=TRAJECTORIES, seed=st.integers(0, 1000), policy=st.sampled_from(sorted(POLICIES)))
def test_everything_ends_and_the_budget_returns_to_zero(
    work: list[tuple[int, int, float]], seed: int, policy: str
) -> None:
    budget = make_budget(policy, capacity_tokens=200, max_requests=6)
    run_all(budget, work, seed)
    assert budget.running == 0
    assert budget.reserved_tokens == 0


@settings(max_examples=60, deadline=None)
@given(work=TRAJECTORIES, seed=st.integers(0, 1000), policy=st.sampled_from(["kv_reserve", "kv_adaptive"]))
def test_admission_never_exceeds_the_capacity(
    work: list[tuple[int, int, float]], seed: int, policy: str
) -> None:
    budget = make_budget(policy, capacity_tokens=200, max_requests=100)
    assert max(run_all(budget, work, seed)) <= 200


def test_reserve_counts_a_group_prompt_once() -> None:
    budget = KVBudget(100, 10)
    assert budget.try_admit("a", "g", 40, 60)
    assert budget.try_admit("b", "g", 40, 60)
    assert budget.reserved_tokens == 80
    assert not budget.try_admit("c", "other", 40, 60)
    budget.release("a")
    assert budget.reserved_tokens == 60
    budget.release("b")
    assert budget.reserved_tokens == 0


def test_too_long_for_the_engine_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_total_tokens"):
        KVBudget(100, 10).try_admit("a", "g", 10, 101)


def test_a_key_is_admitted_once() -> None:
    budget = KVBudget(100, 10)
    budget.try_admit("a", "g", 10, 20)
    with pytest.raises(ValueError, match="already admitted"):
        budget.try_admit("a", "g", 10, 20)


def test_static_ignores_tokens_and_counts_requests() -> None:
    budget = make_budget("static", 100, 3)
    assert [budget.try_admit(i, i, 50, 100) for i in range(4)] == [True, True, True, False]


def test_adaptive_reserves_what_others_needed() -> None:
    budget = AdaptiveBudget(10_000, 100, quantile=0.5)
    assert budget.try_admit("early", "g", 10, 1010)
    assert budget.reserved_tokens == 1010  # nothing known yet: the maximum
    budget.release("early", finished=False)
    for i in range(20):
        assert budget.try_admit(i, "g", 10, 1010)
        budget.settle(i, 10 + 100)
        budget.release(i)
    assert budget.try_admit("late", "g", 10, 1010)
    assert budget.reserved_tokens == 110
    budget.settle("late", 10 + 400)  # longer than any: nothing known, the maximum again
    assert budget.reserved_tokens == 1010


def test_adaptive_learns_from_evictions() -> None:
    budget = AdaptiveBudget(1000, 10)
    before = budget.quantile
    budget.evicted(3)
    assert budget.quantile > before
    for _ in range(1000):
        budget.evicted(0)
    assert budget.quantile < before


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="kv_adaptive"):
        make_budget("best", 10, 1)


def test_remaining_length_is_conditional_and_forgets() -> None:
    estimate = RemainingLength(window=20, min_samples=5)
    for _ in range(10):
        estimate.add(100)
    for _ in range(10):
        estimate.add(300)
    assert estimate.quantile(0, 0.25) == 100
    assert estimate.quantile(200, 0.25) == 100  # of those that got past 200, all ended at 300
    assert estimate.quantile(301, 0.5) is None
    for _ in range(20):
        estimate.add(50)
    assert estimate.quantile(0, 0.99) == 50
