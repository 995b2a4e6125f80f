"""Ruined runs are stopped with the reason; runs that vary as runs do are left alone."""

from __future__ import annotations

import random

import pytest

from rstar2_megatron.training.collapse import CollapseError, CollapseWatch, EmptySteps


def row(step: int, passed: float, *, log_prob: float = -0.3, groups: int = 8, kept: int = 4) -> dict[str, float]:
    return {
        "step": step,
        "rollout/pass_rate": passed,
        "rollout/logprob_mean": log_prob,
        "rollout/groups": groups,
        "rollout/groups_kept": kept,
        "rollout/groups_rejected_all_wrong": 0 if kept else groups,
    }


def test_the_run_that_this_was_written_for_stops_at_its_first_step() -> None:
    """Pass rates 0.547 and 0.562 of 8 groups, then a broken resume: 0.000."""
    watch = CollapseWatch(3, [row(1, 0.547), row(2, 0.562)])
    with pytest.raises(CollapseError, match=r"resume from step 2 the pass rate .* 0\.5545 .* 0 over the 1 steps"):
        watch.add(row(3, 0.0, kept=0))


def test_few_groups_need_more_steps_to_tell() -> None:
    watch = CollapseWatch(0, [row(1, 0.5, groups=4), row(2, 0.5, groups=4)])
    watch.add(row(3, 0.0, groups=4))
    watch.add(row(4, 0.0, groups=4))
    assert watch.compares_with_before
    with pytest.raises(CollapseError, match="over the 3 steps since"):
        watch.add(row(5, 0.0, groups=4))


@pytest.mark.parametrize(
    ("log_prob", "said"), [(-4.0, "fell off a cliff"), (-0.001, "rose sharply")], ids=["noise", "one token repeated"]
)
def test_log_probs_that_jump_after_a_resume(log_prob: float, said: str) -> None:
    watch = CollapseWatch(3, [row(1, 0.5), row(2, 0.5)])
    with pytest.raises(CollapseError, match=f"mean log-prob of generated tokens {said}"):
        watch.add(row(3, 0.5, log_prob=log_prob))


def test_a_rare_token_of_a_model_that_is_nearly_sure_is_no_jump() -> None:
    """Seen with four trajectories a step."""
    watch = CollapseWatch(1, [row(1, 0.0, log_prob=-0.0264, groups=1)])
    watch.add(row(2, 0.0, log_prob=-0.1293, groups=1))
    watch = CollapseWatch(1, [row(1, 0.0, log_prob=-0.1651, groups=1)])  # and that one was in the step before
    watch.add(row(2, 0.0, log_prob=-0.0703, groups=1))
    watch.add(row(3, 0.0, log_prob=-0.0090, groups=1))


def test_ordinary_variation_after_a_resume_passes() -> None:
    """Groups that are all right or all wrong, the noisiest there are: 1,000 resumed runs at each pass rate."""
    rng = random.Random(0)
    stopped = 0
    for number in range(4000):
        rate, groups = (0.1, 0.3, 0.5, 0.9)[number % 4], rng.choice([4, 8, 16, 128])

        def step(at: int, rate: float = rate, groups: int = groups) -> dict[str, float]:
            right = sum(rng.random() < rate for _ in range(groups))
            return row(at, right / groups, log_prob=-0.3 * rng.uniform(0.7, 1.4), groups=groups)

        watch = CollapseWatch(0, [step(at) for at in range(1, 6)])
        try:
            for at in range(6, 12):
                watch.add(step(at))
        except CollapseError:
            stopped += 1
    assert stopped / 4000 < 0.005


def test_later_steps_and_new_runs_are_not_compared() -> None:
    watch = CollapseWatch(0, [row(1, 0.5)])
    for step in (2, 3, 4):
        watch.add(row(step, 0.5))
    assert not watch.compares_with_before
    watch.add(row(5, 0.0))
    new = CollapseWatch(0)
    new.add(row(1, 0.0))
    missing = CollapseWatch(0, [{"step": 1.0}])  # a step without a usable trajectory has no mean log-prob
    missing.add(row(2, 0.0))


def test_steps_without_a_group_to_train_on_end_the_run() -> None:
    watch = CollapseWatch(3)
    for step, kept in ((1, 0), (2, 0), (3, 1), (4, 0), (5, 0)):
        watch.add(row(step, 0.1, kept=kept))
    with pytest.raises(EmptySteps, match=r"no step from 4 to 6 .*24 all wrong.*solves nothing.*max_empty_steps=3"):
        watch.add(row(6, 0.0, kept=0))
    allowed = CollapseWatch(0)
    for step in range(1, 20):
        allowed.add(row(step, 0.0, kept=0))
    easy = CollapseWatch(1)
    with pytest.raises(EmptySteps, match="too easy"):
        easy.add({**row(1, 1.0, kept=0), "rollout/groups_rejected_all_correct": 8, "rollout/groups_rejected_all_wrong": 0})
