"""The KL estimate's clamp of the public codes."""

from __future__ import annotations

import math

import pytest
import torch

from rstar2_megatron.algorithm.kl import kl_estimate


def test_the_clamp_cuts_value_and_gradient_of_a_token_far_away() -> None:
    """exp(3) - 3 - 1 = 16.09 is above 10, exp(2) - 2 - 1 = 4.39 is not."""
    policy = torch.tensor([-3.0, -2.0], requires_grad=True)
    kl_estimate(policy, torch.zeros(2), "low_var_kl", 10.0).sum().backward()
    values = kl_estimate(policy, torch.zeros(2), "low_var_kl", 10.0)
    assert values.tolist() == pytest.approx([10.0, math.exp(2) - 3])
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, 1 - math.exp(2)])
    assert kl_estimate(policy, torch.zeros(2), "low_var_kl")[0].item() == pytest.approx(math.exp(3) - 4)
