"""The common queue and the phase: every rollout handed out once, slices, order, tails, refill."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.algorithm.early_stop import cut_rule
from rstar2_megatron.rollout.phase import OpenGroup, RolloutPhase, Tail, problems_to_refill
from rstar2_megatron.rollout.scheduling.adaptive_budget import POLICIES
from rstar2_megatron.rollout.scheduling.work_queue import Slice, WorkQueue
from rstar2_megatron.settings.schema import AlgorithmSettings
from rstar2_megatron.trajectory import FinishReason, HeldTokens, Problem, Trajectory


def problem(number: int) -> Problem:
    return Problem(f"q{number}", [{"role": "user", "content": "?"}], ["1"])


def ended(index: int, reward: float = 1.0, reason: FinishReason | None = FinishReason.ANSWERED) -> Trajectory:
    return Trajectory("q", index, [1], finish_reason=reason, reward=reward)


def make_phase(groups: int, size: int, *, policy: str = "kv_adaptive", engines: int = 2, **tail) -> RolloutPhase:
    phase = RolloutPhase(WorkQueue(policy, engines, slice_size=4), size, **tail)
    phase.add_problems([problem(i) for i in range(groups)])
    return phase


def take_all(phase: RolloutPhase, engines: int = 2, room: int = 1) -> list[tuple[int, Slice]]:
    taken: list[tuple[int, Slice]] = []
    while phase.queue.left:
        for engine in range(engines):
            taken += [(engine, one) for one in phase.take(engine, room, 0.0)]
    return taken


@given(
    groups=st.integers(1, 12),
    size=st.integers(1, 17),
    engines=st.integers(1, 4),
    policy=st.sampled_from(sorted(POLICIES)),
    room=st.integers(1, 20),
    seed=st.integers(0, 100),
    losses=st.integers(0, 3),
)
def test_every_rollout_is_handed_out_once_and_every_group_completes(
    groups: int, size: int, engines: int, policy: str, room: int, seed: int, losses: int
) -> None:
    """Engines ask and finish in any order, some are lost, some with their workers and all tokens that these held.

    Nothing is lost, given twice, or left over.
    """
    rng = random.Random(seed)
    by: dict[tuple[int, int], int] = {}  # engine that ended a rollout
    phase = make_phase(groups, size, policy=policy, engines=engines)
    running: list[tuple[int, int, int]] = []
    seen: set[tuple[int, int]] = set()
    complete: set[int] = set()
    now = 0.0
    alive, lost = list(range(engines)), 0
    while not phase.over:
        now += 1
        if len(alive) > 1 and lost < losses and rng.random() < 0.1:
            engine, lost = alive.pop(rng.randrange(len(alive))), lost + 1
            phase.queue.lose_engine(engine)
            died = rng.random() < 0.5
            for one in [one for one in running if one[0] == engine]:
                running.remove(one)
                seen.remove(one[1:])
                assert died or phase.ended(*one[:2], ended(one[2], reason=None), now) is None
            if died:
                phase.lose_worker(engine)
                seen -= {one for one, owner in by.items() if owner == engine}
                complete = {group for group in complete if all(by[group, i] != engine for i in range(size))}
                by = {one: owner for one, owner in by.items() if owner != engine}
                assert engine not in phase.reported
        engine = rng.choice(alive)
        for one in phase.take(engine, room, now):
            for index in one.indices:
                assert (one.group, index) not in seen
                seen.add((one.group, index))
                running.append((engine, one.group, index))
        if running and rng.random() < 0.7:
            engine, group, index = running.pop(rng.randrange(len(running)))
            trajectory = ended(index)
            trajectory.held = HeldTokens(engine, index, 1, 1, [], 0.0)
            by[group, index] = engine
            if phase.ended(engine, group, trajectory, now):
                complete.add(group)
    assert len(seen) == groups * size and len(complete) == groups
    closed, carried = phase.finish()
    assert [[t.rollout_index for t in g.trajectories] for g in closed] == [list(range(size))] * groups
    assert [g.problem.query_id for g in closed] == [f"q{i}" for i in range(groups)] and not carried
    assert all(t.held and t.held.worker == by[n, t.rollout_index] for n, g in enumerate(closed) for t in g.usable)


def test_tokens_that_die_with_their_worker_after_the_phase_are_dropped() -> None:
    phase = make_phase(1, 2)
    (one,) = phase.take(0, 1, 0.0)
    for engine, index in enumerate([*one.indices, *phase.take(1, 1, 0.0)[0].indices]):
        trajectory = ended(index)
        trajectory.held = HeldTokens(engine, 0, 1, 1, [], 0.0)
        phase.ended(engine, 0, trajectory, 1.0)
    phase.handed_out = True
    phase.lose_worker(1)
    ((group,), _) = phase.finish()
    assert [t.finish_reason for t in group.trajectories] == [FinishReason.ANSWERED, FinishReason.INFRASTRUCTURE]
    assert "rollout worker 1 died" in group.trajectories[1].error and group.trajectories[1].held is None


def test_static_gives_each_engine_its_share_at_once() -> None:
    phase = make_phase(4, 8, policy="static")
    first = phase.take(0, 1, 0.0)
    assert [one.group for one in first] == [0, 1] and all(len(one.indices) == 8 for one in first)
    assert phase.take(0, 1, 0.0) == []  # the rest is the other engine's, however long that takes


def test_least_requests_serves_the_engine_with_the_fewest() -> None:
    phase = make_phase(1, 8, policy="least_requests")
    assert [one.indices for one in phase.take(0, 1, 0.0)] == [[0]]
    assert phase.take(0, 1, 0.0) == []
    assert [one.indices for one in phase.take(1, 1, 0.0)] == [[1]]
    assert [one.indices for one in phase.take(0, 1, 0.0)] == [[2]]


def test_adaptive_probes_every_group_then_takes_the_longest_first() -> None:
    phase = make_phase(3, 16)
    for _ in range(3):
        phase.take(0, 1, 0.0)
    for group, seconds in ((0, 5.0), (1, 50.0), (2, 20.0)):
        for index in range(4):
            phase.ended(0, group, ended(index), seconds)
    order = [one.group for _, one in take_all(phase)]
    assert order[0] == 1 and order.index(2) < order.index(0)


def test_slices_shrink_towards_the_end() -> None:
    sizes = [len(one.indices) for _, one in take_all(make_phase(2, 16))]
    assert sizes[0] == 4 and sizes[-1] == 1 and sum(sizes) == 32


def test_an_engine_with_much_room_takes_several_slices() -> None:
    phase = make_phase(8, 8)
    assert sum(len(one.indices) for one in phase.take(0, 100, 0.0)) == 12  # no more than the average and a slice


# ------------------------------------------------------------------------------------------------- tails


def algorithm(mode: str = "paper", **changes) -> AlgorithmSettings:
    least = {"min_zero_reward_trace_num": 1, "min_non_zero_reward_trace_num": 1}
    config = {"down_sample_to_n": 4, "mode": mode, **least}
    needed = {"group_size": 8, "sampling_params": {"max_new_tokens": 64}}
    return AlgorithmSettings.model_validate({**needed, "down_sampling": {"down_sampling_config": config}, **changes})


@pytest.mark.parametrize(
    ("positives", "negatives", "missing", "share", "expected"),
    [
        (3, 4, 1, 0.0, True),  # (2, 2) is kept of 7, and of 8 whatever the eighth gets
        (6, 1, 1, 0.0, True),  # (3, 1): the minimum counts bind
        (7, 0, 1, 1.0, False),  # one kind only: the last may save the group
        (2, 1, 5, 1.0, False),  # fewer than are kept
        (3, 2, 3, 0.0, False),  # the missing ones would change the halves
        (3, 2, 3, 0.25, True),  # by one of four, which the share allows
    ],
)
@pytest.mark.parametrize("mode", ["paper", "released"])
def test_cut_rule(positives: int, negatives: int, missing: int, share: float, expected: bool, mode: str) -> None:
    trajectories = [ended(i, reward=float(i < positives)) for i in range(positives + negatives)]
    rule = cut_rule(algorithm(mode), share)
    assert rule(trajectories, missing) is expected


def test_without_down_sampling_nothing_is_cut() -> None:
    config = algorithm()
    config.down_sampling.do_down_sampling = False
    assert not cut_rule(config, 1.0)(seven_of_eight(), 1)


def test_under_filters_nothing_is_cut() -> None:
    """They may leave out what has ended, so the group may need what is missing."""
    assert cut_rule(algorithm(), 1.0)(seven_of_eight(), 1)
    assert not cut_rule(algorithm(trajectory_filters=["truncated"]), 1.0)(seven_of_eight(), 1)


def seven_of_eight() -> list[Trajectory]:
    return [ended(0, 1.0), *(ended(i, 0.0) for i in range(1, 7))]


def end_all_but(phase: RolloutPhase, left: set[tuple[int, int]]) -> None:
    for engine, one in take_all(phase):
        for index in one.indices:
            if (one.group, index) not in left:
                phase.ended(engine, one.group, ended(index, reward=float(index % 2)), 1.0)


def test_wait_waits_for_the_last() -> None:
    phase = make_phase(2, 8)
    end_all_but(phase, {(1, 7)})
    assert not phase.over


def test_cut_closes_the_group_and_marks_what_it_cut() -> None:
    phase = make_phase(2, 8, tail="cut", may_cut=cut_rule(algorithm(), 0.25))
    end_all_but(phase, {(1, 7)})
    assert phase.over
    groups, carried = phase.finish()
    assert not carried and [len(g.usable) for g in groups] == [8, 7]
    assert groups[1].trajectories[7].finish_reason is FinishReason.CUT


def test_cut_keeps_the_tokens_of_an_earlier_phase() -> None:
    """A group carried here (tail was changed at a resume) whose rest never ran again."""
    half = Trajectory("q0", 7, [1], response_ids=[5, 6], loss_mask=[1, 1], rollout_logprobs=[0.0, 0.0])
    both = {index: ended(index, reward=float(index % 2)) for index in range(6)}
    phase = RolloutPhase(WorkQueue("kv_adaptive", 2, 4), 8, tail="cut", may_cut=cut_rule(algorithm(), 0.5))
    phase.add([OpenGroup(problem(0), 8, both, {7: half})])
    assert phase.over
    (group,), _ = phase.finish()
    waiting, cut = group.trajectories[6:]
    assert waiting.finish_reason is cut.finish_reason is FinishReason.CUT
    assert cut.response_ids.tolist() == [5, 6] and not waiting.prompt_tokens and len(group.usable) == 6
    for trajectory in (waiting, cut):
        trajectory.check()


def test_carry_goes_on_in_the_next_phase_and_is_waited_for_at_its_age() -> None:
    tail: Tail = "carry"
    phase = make_phase(4, 8, tail=tail, carry_share=0.25)
    end_all_but(phase, {(3, 6), (3, 7), (2, 0)})
    assert not phase.over  # two of four groups are unfinished
    phase.ended(0, 2, ended(0), 1.0)
    assert phase.over
    half = Trajectory("q3", 6, [1], response_ids=[5, 6], open_turn=0)
    phase.ended(0, 3, half, 2.0)  # parked; of number 7 nothing came back
    groups, carried = phase.finish()
    assert [g.problem.query_id for g in groups] == ["q0", "q1", "q2"]

    later = RolloutPhase(WorkQueue("kv_adaptive", 2, 4), 8, tail=tail, carry_share=0.5, max_carry_age=1)
    later.add([*carried, OpenGroup(problem(9), 8)])
    given_out = take_all(later)
    resumed = [one for _, one in given_out if one.group == 0]
    assert sorted(index for one in resumed for index in one.indices) == [6, 7]
    assert {index: t for one in resumed for index, t in one.parked.items()} == {6: half}
    for index in range(8):
        later.ended(0, 1, ended(index), 3.0)
    assert not later.over  # one of two is few enough, but it was carried once already
    later.ended(0, 0, ended(6), 4.0)
    done = later.ended(0, 0, ended(7), 4.0)
    assert later.over and done is not None and len(done.usable) == 8


# ------------------------------------------------------------------------------------------------ refill


@pytest.mark.parametrize(
    ("survivors", "open_groups", "left", "expected"),
    [(0, 8, 8, 0), (3, 5, 8, 0), (0, 2, 8, 2), (1, 0, 8, 3), (1, 0, 2, 2), (1, 0, 0, 0)],
)
def test_refill_asks_for_what_is_missing(survivors: int, open_groups: int, left: int, expected: int) -> None:
    assert problems_to_refill(survivors, open_groups, target=8, min_share=0.5, left=left) == expected
