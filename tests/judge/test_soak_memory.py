"""When the soak calls memory flat."""

from __future__ import annotations

import random

import pytest

from benchmarks.judge.soak import memory_is_flat


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_a_high_start_are_flat(seed: int) -> None:
    noise = random.Random(seed)
    samples = [200.0 + noise.uniform(-15, 15) + (80 if n < 20 else 0) for n in range(100)]
    assert memory_is_flat(samples)


@pytest.mark.parametrize("growth_mb", [0.8, 1.0, 5.0])
def test_a_leak_is_not_flat(growth_mb: float) -> None:
    noise = random.Random(0)
    assert not memory_is_flat([200.0 + growth_mb * n + noise.uniform(-5, 5) for n in range(100)])


def test_too_few_samples_tell_nothing() -> None:
    assert not memory_is_flat([200.0] * 7)
