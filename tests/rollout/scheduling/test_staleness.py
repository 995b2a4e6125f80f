"""No order of events makes the trainer train a token that is too old, wait for ever, or drop a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.rollout.scheduling.staleness import StalenessSchedule


class Run:
    """A trainer and engines that do what they are told; every step is checked against the bound."""

    def __init__(self, batch: int, bound: int, last_step: int | None = None) -> None:
        self.schedule = StalenessSchedule(batch, bound, last_step=last_step)
        self.batch, self.bound = batch, bound
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.oldest: dict[int, int] = {}
        self.added = 0
        self.trained: list[int] = []
        self.rejected = 0
        self.training = False

    def admit(self) -> None:
        for _ in range(self.schedule.room):
            self.schedule.add(self.added)
            self.waiting.append(self.added)
            self.added += 1

    def begin(self, which: int) -> None:
        if self.waiting:
            group = self.waiting.pop(which % len(self.waiting))
            self.schedule.begin(group)
            self.running.append(group)
            self.oldest[group] = self.schedule.engine_version

    def end(self, which: int, rejected: bool) -> None:
        if self.running:
            group = self.running.pop(which % len(self.running))
            if rejected:
                self.schedule.remove(group)
                self.rejected += 1
            else:
                self.schedule.complete(group, self.oldest[group])

    def train(self) -> bool:
        version = self.schedule.next_version
        assert not self.schedule.overdue()
        if self.training or (taken := self.schedule.take()) is None:
            return False
        assert len(taken) == self.batch
        assert all(self.oldest[group] >= version - self.bound for group in taken)
        self.trained += taken
        self.training = True
        return True

    def sync(self) -> None:
        if self.training:
            self.schedule.new_weights(self.schedule.next_version)
            self.training = False

    def finish_what_is_open(self) -> None:
        while self.waiting:
            self.begin(0)
        while self.running:
            self.end(0, rejected=False)


@given(
    batch=st.integers(1, 5),
    bound=st.integers(0, 4),
    events=st.lists(st.tuples(st.sampled_from(["begin", "end", "reject", "train", "sync"]), st.integers(0, 50)), max_size=200),
)
def test_in_any_order_of_events_the_bound_holds_and_training_goes_on(
    batch: int, bound: int, events: list[tuple[str, int]]
) -> None:
    run = Run(batch, bound)
    for event, which in events:
        run.admit()
        if event == "begin":
            run.begin(which)
        elif event == "end":
            run.end(which, rejected=False)
        elif event == "reject":
            run.end(which, rejected=True)
        elif event == "train":
            run.train()
        else:
            run.sync()
    for _ in range(2 * bound + 3):  # whatever has happened, a batch comes when all that is open has ended
        run.sync()
        run.admit()
        run.finish_what_is_open()
        assert run.train()
    assert len(run.trained) == len(set(run.trained)) and not run.schedule.overdue()


@given(batch=st.integers(1, 4), bound=st.integers(1, 3), order=st.randoms(use_true_random=False))
def test_a_trainer_that_never_waits_for_the_oldest_group_meets_it_at_the_bound(batch: int, bound: int, order: object) -> None:
    """One group takes for ever while all others end at once: the trainer gets as far as the bound allows, and waits."""
    run = Run(batch, bound)
    run.admit()
    run.begin(0)  # group 0 stays
    slow = run.running.pop()
    steps = 0
    while steps < 2 * bound + 2:
        run.admit()
        run.finish_what_is_open()
        if not run.train():
            break
        steps += 1
        run.sync()
    assert steps == bound
    run.schedule.complete(slow, 0)
    assert run.train() and slow in run.trained


def test_nothing_begins_that_the_last_step_cannot_train_on() -> None:
    run = Run(3, 2, last_step=4)
    for _ in range(4):
        run.admit()
        run.finish_what_is_open()
        assert run.train()
        run.sync()
    run.admit()
    assert run.added == 12 and not run.waiting


def test_without_staleness_nothing_begins_while_the_trainer_trains() -> None:
    run = Run(2, 0)
    run.admit()
    assert run.added == 2
    run.finish_what_is_open()
    assert run.train() and run.schedule.room == 0
    run.sync()
    assert run.schedule.room == 2


def test_after_a_resume_with_a_smaller_bound_what_is_too_old_is_named() -> None:
    schedule = StalenessSchedule(1, 1, version=5)
    for group, oldest in ((0, 3), (1, 4), (2, 5)):
        schedule.add(group, oldest)
        schedule.complete(group, oldest)
    assert schedule.overdue() == [0] and schedule.room == 0
    schedule.remove(0)
    assert schedule.take() == [1] and schedule.take() == [2] and schedule.take() is None


@pytest.mark.parametrize("smaller_batch", [1, 2])
def test_after_a_resume_with_a_smaller_batch_no_batch_is_waited_for_in_vain(smaller_batch: int) -> None:
    schedule = StalenessSchedule(smaller_batch, 1, version=1)
    for group in range(4):
        schedule.add(group, 0)
        schedule.complete(group, 0)
    assert len(schedule.take() or []) == smaller_batch
    assert len(schedule.overdue()) == 4 - smaller_batch


def test_a_reopened_group_counts_as_open() -> None:
    schedule = StalenessSchedule(1, 1)
    schedule.add(0)
    schedule.begin(0)
    schedule.complete(0, 0)
    schedule.reopen(0)
    assert schedule.take() is None and schedule.num_complete == 0
    schedule.complete(0, 0)
    assert schedule.take() == [0]
