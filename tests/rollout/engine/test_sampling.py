"""Sampling on a CPU by the inverse distribution function."""

from __future__ import annotations

import pytest
import torch

from rstar2_megatron.cpu.sglang_sampling import sample


def test_frequencies_are_the_probabilities() -> None:
    torch.manual_seed(0)
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0], [0.1, 0.0, 0.0, 0.0, 0.2, 0.3, 0.4]])
    draws = 100_000
    words = sample(probs.repeat_interleave(draws, dim=0)).view(2, draws)
    for row, expected in zip(words, probs, strict=True):
        seen = torch.bincount(row, minlength=7) / draws
        assert torch.all(seen[expected == 0] == 0)
        deviation = (expected * (1 - expected) / draws).sqrt()
        assert torch.all((seen - expected).abs() <= 5 * deviation)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24, 1.0])
def test_a_word_of_probability_zero_is_never_drawn(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first nor the last word, at the ends of the uniform numbers and at one that was rounded up to 1."""
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, uniform))
    probs = torch.tensor([[0.0, 0.7, 0.3, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    words = sample(probs)
    assert torch.all(probs.gather(1, words) > 0)
    assert words.shape == (3, 1)


def test_rows_need_no_sum_of_one() -> None:
    torch.manual_seed(0)
    words = sample(torch.tensor([[0.0, 1e-4, 3e-4]]).expand(40_000, 3).contiguous()).view(-1)
    assert 0.73 < (words == 2).float().mean() < 0.77


def test_large_vocabularies_keep_their_tail() -> None:
    """49,152 words, half of the mass on the last tenth of them in equal parts: each tenth of that tail is drawn alike."""
    torch.manual_seed(0)
    size, tail = 49152, 4900
    probs = torch.full((1, size), 0.5 / (size - tail))
    probs[0, -tail:] = 0.5 / tail
    words = sample(probs.expand(2_000, size)).view(-1)
    late = words[words >= size - tail] - (size - tail)
    assert 0.45 < late.numel() / 2_000 < 0.55
    share = torch.histc(late.float(), bins=10, min=0, max=tail) / late.numel()
    assert torch.all((share - 0.1).abs() < 0.05)
