"""Admission: never over budget, nobody starves, everything is given back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.rollout.scheduling.adaptive_budget import POLICIES, AdaptiveBudget, make_budget
from rstar2_megatron.rollout.scheduling.admission_queue import AdmissionQueue, WaitingTrajectory
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget
from rstar2_megatron.rollout.scheduling.length_estimate import GroupDurations, LengthSurvival

TRAJECTORIES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 140), st.floats(0.01, 1.0)), min_size=1, max_size=40)


def run_all(budget: KVBudget, work: list[tuple[int, int, float]], seed: int, group_size: int = 4) -> list[int]:
    """A toy engine: admits in order, lets running trajectories grow by random steps, ends them at their length.

    Returns reserved tokens after each admission; a lone one is admitted whatever it may need. Every one must end.
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
            reserved.append(budget.reserved_tokens if budget.running > 1 else 0)
        assert running, "nothing runs and nothing is admitted: the queue is stuck"
        key = rng.choice(sorted(running))
        length, final = running[key]
        length = min(final, length + rng.randint(1, 30))
        budget.set_length(key, length)
        running[key] = (length, final)
        if length == final:
            del running[key]
            budget.release(key)
            ended += 1
    assert ended == len(work)
    return reserved


@given(work=TRAJECTORIES, seed=st.integers(0, 1000), policy=st.sampled_from(sorted(POLICIES)))
def test_everything_ends_and_the_budget_returns_to_zero(work: list[tuple[int, int, float]], seed: int, policy: str) -> None:
    budget = make_budget(policy, capacity_tokens=200, max_requests=6)
    run_all(budget, work, seed)
    assert budget.running == 0
    assert budget.reserved_tokens == 0


@given(work=TRAJECTORIES, seed=st.integers(0, 1000), policy=st.sampled_from(["kv_reserve", "kv_adaptive"]))
def test_admission_never_exceeds_the_capacity(work: list[tuple[int, int, float]], seed: int, policy: str) -> None:
    budget = make_budget(policy, capacity_tokens=200, max_requests=100)
    assert max(run_all(budget, work, seed)) <= 200


def grow_together(
    budget: KVBudget, work: list[tuple[int, int, float]], steps: list[int]
) -> tuple[AdmissionQueue, dict[int, int]]:
    """A toy engine: between two reports all running trajectories grow by the same number of tokens. Preempted ones wait.

    Asserts after every report that the remaining trajectories fit (unless only one is left), and that the one with the
    most tokens remains. Returns the queue and the final lengths, when all have ended.
    """
    scheduler = AdmissionQueue(budget)
    final = {i: max(1, round(response * share)) for i, (_, response, share) in enumerate(work)}
    length = dict.fromkeys(final, 0)

    def admission(i: int) -> WaitingTrajectory:
        prompt, response, _ = work[i]
        return WaitingTrajectory(i, i, prompt, prompt + response, prompt + length[i])

    scheduler.add([admission(i) for i in final])
    running: set[int] = set()
    ended: dict[int, int] = {}
    for round_ in range(20_000):
        running |= {int(a.key) for a in scheduler.admit()}
        if not running:
            break
        step = steps[round_ % len(steps)]
        for i in sorted(running):
            length[i] = min(final[i], length[i] + step)
        budget.observe(0, {i: work[i][0] + length[i] for i in running})
        for i in sorted(running):
            if length[i] == final[i]:
                running.remove(i)
                ended[i] = length[i]
                budget.release(i)
        preempted = [int(key) for key in scheduler.budget.preempt()]
        assert set(preempted) <= running and (not running or len(preempted) < len(running))
        assert all(length[i] <= length[j] for i in preempted for j in running - set(preempted))
        for i in preempted:
            running.remove(i)
            scheduler.requeue(admission(i))
        if isinstance(budget, AdaptiveBudget) and len(running) > 1:
            assert budget.used_tokens <= budget.capacity_tokens
    assert scheduler.num_waiting == 0 and ended == final
    return scheduler, length


@given(work=TRAJECTORIES, steps=st.lists(st.integers(1, 30), min_size=1, max_size=5), policy=st.sampled_from(sorted(POLICIES)))
def test_what_stays_fits_and_the_preempted_end_too(work: list[tuple[int, int, float]], steps: list[int], policy: str) -> None:
    budget = make_budget(policy, capacity_tokens=200, max_requests=100)
    if isinstance(budget, AdaptiveBudget):  # it has learnt that all are short, which they are not
        run_lengths(budget, [1] * 600, 140)
        budget.observe(0, {})
    grow_together(budget, work, steps)
    assert budget.running == 0 and budget.reserved_tokens == budget.used_tokens == 0


def test_the_youngest_make_room_once_and_are_the_first_to_go_on() -> None:
    budget = AdaptiveBudget(1000, 100)
    scheduler = AdmissionQueue(budget)
    run_lengths(budget, [10] * 600, 500)
    budget.observe(0, {})
    scheduler.add([WaitingTrajectory(i, i, 10, 510, 10) for i in range(40)])
    count = len(scheduler.admit())
    assert count > 10
    budget.observe(0, {i: 10 + 10 * i for i in range(10)} | dict.fromkeys(range(10, count), 61))
    preempted = scheduler.budget.preempt()
    assert preempted[:3] == [0, 1, 2] and budget.running == count
    assert scheduler.budget.preempt() == []  # those that leave are not asked twice
    for i in preempted:
        assert isinstance(i, int)
        scheduler.requeue(WaitingTrajectory(i, i, 10, 510, 10 + 10 * i))
    assert budget.used_tokens <= 1000 and not scheduler.admit()
    left = [key for key in range(count) if key not in preempted]
    for key in left[:-1]:
        budget.release(key)
    assert [a.key for a in scheduler.admit()][:2] == preempted[:2]  # before those that never ran


def test_the_engine_s_own_figure_counts() -> None:
    budget = AdaptiveBudget(1000, 100)
    for key in range(2):
        assert budget.try_admit(key, key, 10, 410)
    lengths = {0: 310, 1: 410}
    budget.observe(0, lengths, 720)
    budget.observe(0, lengths, 720)
    assert budget.preempt() == []
    budget.observe(0, lengths, 1100)  # it holds 380 tokens that nobody here knows of
    assert budget.preempt() == [0]


def test_a_long_wait_for_a_tool_gives_its_room_to_others() -> None:
    budget = AdaptiveBudget(200, 100)
    assert budget.try_admit("slow", "g", 10, 100) and budget.try_admit("b", "h", 10, 100)
    assert not budget.try_admit("c", "i", 10, 90)
    for _ in range(2):
        budget.observe(0, {"slow": 40}, 60, ["slow"])
        assert budget.preempt() == []  # a call of a second or two is no long wait
    budget.observe(0, {"slow": 40}, 60, ["slow"])
    assert budget.preempt() == ["slow"] and budget.running == 1
    assert budget.try_admit("c", "i", 10, 90)
    budget.observe(0, {"slow": 40, "b": 20}, 60, ["slow"])
    assert budget.preempt() == []
    budget.set_length("slow", 50)  # the answer is there
    budget.release("slow", finished=False)
    assert not budget.try_admit("slow", "g", 10, 100, 50)
    budget.release("b")
    assert budget.try_admit("slow", "g", 10, 100, 50)  # and waits like any other from here on
    budget.release("slow")
    budget.release("c")
    assert budget.running == budget.reserved_tokens == budget.used_tokens == 0


def test_nobody_is_set_aside_while_there_is_room() -> None:
    budget = AdaptiveBudget(1000, 100)
    assert budget.try_admit("slow", "g", 10, 100) and budget.try_admit("b", "h", 10, 100)
    for _ in range(9):
        budget.observe(0, {}, 60, ["slow"])
        assert budget.preempt() == []
    assert budget.running == 2


def test_policies_that_reserve_or_count_never_preempt() -> None:
    for policy in ("static", "least_requests", "kv_reserve"):
        budget = make_budget(policy, 100, 10)
        assert budget.try_admit("a", "g", 10, 60) and budget.try_admit("b", "g", 10, 50)
        budget.observe(3, {"a": 60, "b": 60}, 200)
        assert budget.preempt() == []


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


def run_lengths(budget: AdaptiveBudget, lengths: list[int], longest: int) -> None:
    for i, length in enumerate(lengths):
        assert budget.try_admit(("ended", i), "g", 10, 10 + longest)
        budget.set_length(("ended", i), 10 + length)
        budget.release(("ended", i))


def admitted(budget: KVBudget, longest: int) -> int:
    count = 0
    while budget.try_admit(count, "g", 10, 10 + longest):
        count += 1
    return count


def test_adaptive_starts_as_careful_as_the_paper_and_learns() -> None:
    assert admitted(AdaptiveBudget(10_000, 1000), 1000) == admitted(KVBudget(10_000, 1000), 1000) == 9
    budget = AdaptiveBudget(10_000, 1000)
    run_lengths(budget, [100] * 99, 1000)
    budget.try_admit("last of a step", "g", 10, 1010)
    budget.observe(0, {})
    budget.release("last of a step", finished=False)  # the next step is no ramp from the few that ran at this one's end
    count = admitted(budget, 1000)
    # nobody was longer than 100, so about 10,000 / 100 fit (in bins of 16 tokens)
    assert 30 < count < 110


def test_adaptive_holds_back_when_lengths_turn_out_longer() -> None:
    budget = AdaptiveBudget(10_000, 1000)
    run_lengths(budget, [100] * 600, 1000)
    budget.observe(0, {})
    before = 0
    while budget.try_admit(before, "g", 10, 1010):
        before += 1
    assert before > 30
    budget.observe(0, dict.fromkeys(range(before), 510))  # all of them got much longer
    assert budget.reserved_tokens > budget.capacity_tokens
    assert not budget.try_admit("late", "g", 10, 1010)


def test_a_step_of_the_report_sees_growth_inside_a_turn() -> None:
    budget = AdaptiveBudget(10_000, 10)
    assert budget.try_admit("a", "g", 10, 1010)
    budget.observe(0, {"a": 400})
    assert budget.used_tokens == 400
    budget.release("a")
    assert budget.used_tokens == budget.reserved_tokens == 0


def test_evictions_widen_the_margin_and_quiet_narrows_it() -> None:
    budget = AdaptiveBudget(1000, 10)
    before = budget.z
    budget.observe(3, {})
    assert budget.z > before
    for _ in range(1000):
        budget.observe(0, {})
    assert budget.z < before


@given(seed=st.integers(0, 1000))
def test_survival_is_unbiased_while_most_still_run(seed: int) -> None:
    """A thousand trajectories started together, looked at when half have ended: the ended ones alone mislead."""
    rng = random.Random(seed)
    lengths = [min(1023, int(rng.expovariate(1 / 300))) for _ in range(1000)]
    now = sorted(lengths)[500]
    survival = LengthSurvival(1024)
    ended = [length for length in lengths if length <= now]
    for length in ended:
        survival.add(length)
    survival.refresh([now] * (1000 - len(ended)))
    estimate = float(np.exp(survival.log_survival[survival.bin_of(now)]))
    assert abs(estimate - 0.5) < 0.1  # exactly half have got past `now`; of the ended ones none has


def test_lengths_nobody_has_reached_are_survived() -> None:
    survival = LengthSurvival(1000)
    assert not survival.log_survival.any()
    for _ in range(100):
        survival.add(100)
    survival.refresh([])
    assert np.exp(survival.log_survival[survival.bin_of(900)]) > 0.1


def test_old_lengths_are_forgotten() -> None:
    survival = LengthSurvival(1000)
    for _ in range(3000):
        survival.add(100)
    for _ in range(12_000):
        survival.add(800)
    survival.refresh([])
    assert np.exp(survival.log_survival[survival.bin_of(500)]) > 0.9


def test_groups_are_ordered_by_siblings_ended_and_running() -> None:
    lengths = GroupDurations()
    for _ in range(4):
        lengths.add(1, 10.0)
        lengths.add(2, 40.0)
    assert lengths.expected(2) > lengths.expected(3) > lengths.expected(1)  # nothing known of 3: the mean
    assert lengths.expected(3, running=8 * 60.0) > lengths.expected(2)  # none of its eight ended in a minute
