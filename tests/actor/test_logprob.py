"""The chunked vocabulary head equals torch's log_softmax over the whole vocabulary, values and gradients."""

from __future__ import annotations

import pytest

from tests.actor import programs
from tests.actor.ranks import RankPool


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_head_equals_log_softmax(pool: RankPool, ranks: int) -> None:
    for worst in pool.run(programs.heads, ranks, 7):
        assert set(worst) == {"log_prob", "entropy", "hidden", "weight"}
        assert max(worst.values()) < 2e-5, worst
