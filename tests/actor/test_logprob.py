"""The chunked vocabulary head equals torch's log_softmax over the whole vocabulary, values and gradients."""

from __future__ import annotations

import pytest

from tests.actor import programs
from tests.actor.ranks import RankPool


@pytest.mark.parametrize(
    "ranks, in_blocks", [(1, False), (2, False), (4, False), (2, True)], ids=["1", "2", "4", "2, as on CUDA"]
)
def test_head_equals_log_softmax(pool: RankPool, ranks: int, in_blocks: bool) -> None:
    for worst in pool.run(programs.heads, ranks, 7, in_blocks):
        assert set(worst) == {"log_prob", "entropy", "hidden", "weight"}
        assert max(worst.values()) < 2e-5, worst


@pytest.mark.parametrize("shared", [False, True], ids=["own weight", "shared with an embedding"])
def test_low_precision_gradients_are_summed_in_the_fp32_buffer(pool: RankPool, shared: bool) -> None:
    """512 equal chunks: a bf16 sum would stop growing. What DDP adds besides is nothing, or zeros."""
    error, placeholder = pool.run(programs.head_gradient_in_bf16, 1, shared)[0]
    assert error < 1e-2
    assert placeholder == 0.0 or not shared


def test_on_cuda_logits_are_not_rounded(pool: RankPool) -> None:
    """bf16 inputs, fp32 products: log-probs equal an fp32 head's on the same inputs; gradients are rounded once."""
    log_prob, hidden, weight = pool.run(programs.head_with_fp32_products, 1)[0]
    assert log_prob < 2e-6
    assert hidden < 5e-3 and weight < 5e-3
