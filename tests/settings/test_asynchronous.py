"""`algorithm.max_staleness` beside what it does not go together with."""

from __future__ import annotations

import pytest

from rstar2_megatron.settings.asynchronous import asynchronous_problems
from rstar2_megatron.settings.load import ConfigError, load_settings

APART = {"actor": [0], "rollout": [1], "reward": [0]}


def problems(*overrides: str, places: dict[str, list[int]] = APART, bound: int = 2) -> list[str]:
    settings = load_settings("rstar2-tiny-cpu", [f"algorithm.max_staleness={bound}", *overrides])
    return list(asynchronous_problems(settings, places))


def test_apart_it_goes_and_without_it_everything_goes() -> None:
    assert problems() == []
    together = {"actor": [0, 1], "rollout": [0, 1]}
    assert problems("rollout.tail=carry", places=together, bound=0) == []
    assert problems("runner.task_type=sft", places=together) == []


def test_shared_slots_are_refused_with_the_reason() -> None:
    (sentence,) = problems(places={"actor": [0, 1, 2], "rollout": [1, 2, 3]})
    assert "max_staleness=2" in sentence and "slots 1, 2, where one waits for the other" in sentence
    assert "actor: 0, rollout: 1" in sentence


@pytest.mark.parametrize(
    "override, remedy",
    [
        ("rollout.tail=cut", "set rollout.tail=wait"),
        ("rollout.tail=carry", "set rollout.tail=wait"),
        ("rollout.scheduler=static", "kv_adaptive"),
        ("algorithm.refill.enabled=True", "algorithm.refill.enabled=False"),
        ("runner.replay_rollouts=elsewhere", "runner.replay_rollouts=elsewhere"),
    ],
)
def test_each_key_that_contradicts_it_is_one_sentence(override: str, remedy: str) -> None:
    (sentence,) = problems(override)
    assert "algorithm.max_staleness=2" in sentence and remedy in sentence and sentence.count(". ") == 0


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_staleness"):
        problems(bound=-1)
