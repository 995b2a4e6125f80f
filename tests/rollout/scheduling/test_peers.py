"""Other frameworks' admission rules in the simulator: what their documents say, by hand."""

from __future__ import annotations

import pytest

from benchmarks.rollout.peers import PEERS, DynamoThunderAgent, InFlightCap, PrimeRL, ShortestPrompts, ThunderAgent
from benchmarks.rollout.simulator import Cluster, Simulator, make_budgets
from benchmarks.rollout.traces import Shape, synthetic
from rstar2_megatron.rollout.scheduling.kv_budget import KVBudget
from rstar2_megatron.settings.planning.estimates import EngineSpeed

SPEED = EngineSpeed(0.01, 1e-4, 1e-7, 0.01, 1e-5)


def after_reports(budget: KVBudget, count: int, lengths: dict[str, int], at_tools: tuple[str, ...] = ()) -> list[str]:
    """What the budget pauses in `count` reports in which nothing changes."""
    paused = []
    for _ in range(count):
        budget.observe(0, lengths, sum(lengths.values()), at_tools)
        paused += budget.preempt()
    return [str(key) for key in paused]


@pytest.mark.parametrize("policy", PEERS)
@pytest.mark.parametrize(("kv_tokens", "tool_s"), [(20_000, 0.2), (60_000, 0.2), (20_000, 10.0)])
def test_every_peer_finishes_a_phase(policy: str, kv_tokens: int, tool_s: float) -> None:
    traces = synthetic(Shape(8, 8, 2000, 500, 0.8, tool_median_s=tool_s), seed=3)
    cluster = Cluster(2, SPEED, kv_tokens, 64)
    result = Simulator(traces, cluster, policy, slice_size=4).run()
    assert result.makespan_s >= result.p99_s >= result.p50_s > 0
    assert len(result.wait_s_by_prompt) == 4 and max(result.wait_s_by_prompt) < result.makespan_s


def test_a_new_program_needs_its_tokens_and_a_hundred_more() -> None:
    budget = ThunderAgent(1000, 8)
    assert budget.try_admit("a", 0, 300, 900) and budget.try_admit("b", 0, 300, 900)  # 400 each, though the prompt is shared
    assert not budget.try_admit("c", 0, 300, 900)
    budget.release("a")
    assert not budget.try_admit("c", 0, 300, 900)  # only the next look resumes what waits
    assert after_reports(budget, 5, {"b": 300}) == []
    assert budget.try_admit("c", 0, 300, 900)


def test_too_many_tokens_pause_the_smallest_programs_in_tool_calls() -> None:
    budget = ThunderAgent(2000, 8)
    for key in "abcd":
        assert budget.try_admit(key, key, 200, 1900)
    for key, length in (("b", 500), ("c", 400)):
        budget.set_length(key, length)
    assert after_reports(budget, 4, {"a": 300, "d": 500}, ("b", "c")) == []
    # 300 + 500 + 400 + 500 tokens and 4 x 100: 100 too many, so c; its reservation is free at once
    assert after_reports(budget, 1, {"a": 300, "d": 500}, ("b", "c")) == ["c"]
    assert budget.running == 3 and after_reports(budget, 5, {"a": 300, "d": 500}, ("b",)) == []


def test_without_enough_tool_calls_all_others_are_paused_at_their_turn_s_end() -> None:
    budget = DynamoThunderAgent(1000, 8)
    for key in "ab":
        assert budget.try_admit(key, key, 300, 900)
    assert sorted(after_reports(budget, 5, {"a": 400, "b": 400})) == ["a", "b"]  # 1000 of 950
    assert budget.running == 2 and after_reports(budget, 5, {"a": 400, "b": 400}) == []  # each is told once
    after_reports(budget, 1, {"b": 410}, ("a",))
    assert budget.running == 1  # a has ended its turn


def test_a_tool_call_counts_half_after_each_second_where_programs_are_resumed() -> None:
    budgets = ThunderAgent(1000, 8), DynamoThunderAgent(1000, 8)
    for budget in budgets:
        assert budget.try_admit("a", "a", 700, 900)
        after_reports(budget, 5, {}, ("a",))
    upstream, dynamo = budgets
    assert upstream.try_admit("b", "b", 500, 900)  # 700 / 32 + 100 are counted
    assert not dynamo.try_admit("b", "b", 500, 900)


def test_what_did_not_fit_at_once_starts_by_the_length_of_its_prompt() -> None:
    queue = ShortestPrompts(2, {0: 500, 1: 100, 2: 300})
    queue.add([(group, [0, 1]) for group in range(3)])
    assert queue.take(0, 0.0) == (0, [0])  # all fit
    assert [queue.take(0, 10.0) for _ in range(5)] == [(1, [0]), (1, [1]), (2, [0]), (2, [1]), (0, [1])]


def capped(running: int, usage: float, *, waiting: int = 0, polls: int = 1) -> tuple[InFlightCap, PrimeRL, int]:
    """One engine of 20 trajectories at most at the start, `running` of them in it, after polls at that usage."""
    cap = InFlightCap()
    budget = PrimeRL(20_000, 64, cap)
    for key in range(running):
        assert budget.try_admit(key, key, 100, 1000)
    cancelled = 0
    for _ in range(5 * polls):
        budget.observe(0, dict.fromkeys(range(running - waiting), 100), int(usage * 20_000))
        cancelled += len(budget.preempt())
    return cap, budget, cancelled


def test_the_cap_begins_with_what_surely_fits_and_grows_with_each_end() -> None:
    cap, budget, _ = capped(20, 0.4)
    assert cap.cap == 20 and not budget.try_admit("more", 0, 100, 1000) and not budget.has_room()
    for key in range(20):
        budget.release(key)
        assert budget.try_admit(f"next {key}", 0, 100, 1000)
    assert cap.cap == pytest.approx(20 * 1.1, rel=0.01)  # half of the way to 80% grows by half of 1.2


def test_the_cap_is_lowered_above_the_soft_cap_and_the_youngest_are_cancelled_above_the_hard_one() -> None:
    soft, _, cancelled = capped(20, 0.84, polls=3)
    assert (soft.cap, cancelled) == (int(20 * 0.7 / 0.84), 0)  # once, then six polls pass
    hard, budget, cancelled = capped(20, 0.95)
    assert (hard.cap, cancelled) == (14, 6)
    assert budget.running == 20  # until they are parked


def test_many_waiting_requests_cut_the_cap_after_six_polls() -> None:
    assert capped(20, 0.5, waiting=8, polls=5)[0].cap == 20
    cap, _, cancelled = capped(20, 0.5, waiting=8, polls=6)
    assert (cap.cap, cancelled) == (18, 2)


def test_the_engines_of_a_phase_share_one_cap() -> None:
    budgets = make_budgets(Cluster(2, SPEED, 20_000, 64), "prime_rl")
    assert all(isinstance(budget, PrimeRL) for budget in budgets)
    for key in range(40):
        assert budgets[0].try_admit(key, key, 100, 1000)
    assert not budgets[1].has_room()
