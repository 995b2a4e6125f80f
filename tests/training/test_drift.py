"""The drift of log-probs by hand."""

from __future__ import annotations

import math

import pytest

from rstar2_megatron.training.metrics import DIFFERENCE, RECENT, logprob_drift


def rows(*values: float | None) -> list[dict[str, float]]:
    return [{"step": i, **({} if value is None else {DIFFERENCE: value})} for i, value in enumerate(values)]


def test_recent_steps_against_the_median_of_the_earlier_ones() -> None:
    earlier = (1.0, 2.0, 3.0, 2.0, 50.0)  # median 2
    assert RECENT == 5 and logprob_drift(rows(*earlier, 4.0, 4.0, 4.0, 4.0)) is None
    assert logprob_drift(rows(*earlier, 4.0, 4.0, 4.0, 4.0, 9.0)) == pytest.approx(2.5)
    assert logprob_drift(rows(None, *earlier, 4.0, 4.0, math.nan, 4.0, 4.0, 9.0)) == pytest.approx(2.5)
    assert logprob_drift(rows(*[0.0] * 12)) is None
