"""The optimizer on the host against torch's own, slice by slice, and what it is refused with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.actor import host_optimizer
from rstar2_megatron.actor.host_optimizer import HostAdamW
from rstar2_megatron.actor.layout import check_layout
from rstar2_megatron.model.model_config import ModelConfig
from tests.actor.programs import training
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings

BF16 = {"precision": "bf16"}


def group_of(parameters: list[torch.Tensor], **changes: Any) -> dict[str, Any]:
    return {"params": parameters, "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **changes}


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    size_of_slice=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_torchs_adamw_whatever_the_slices(sizes: list[int], size_of_slice: int, dtype: torch.dtype) -> None:
    """Also for bf16 weights: what is updated is the fp32 master, and the weights are its rounding."""
    torch.manual_seed(sum(sizes))
    weights = [torch.randn(n).to(dtype) for n in sizes]
    right = [weight.float().requires_grad_() for weight in weights]
    adam = torch.optim.AdamW([group_of(right)])  # type: ignore[list-item]
    host = HostAdamW([group_of(weights)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_optimizer, "SLICE", size_of_slice)
        for rate in (1e-2, 3e-3, 1e-2):
            for weight, parameter in zip(weights, right):
                parameter.grad = torch.randn(parameter.shape)
                weight.decoupled_grad = parameter.grad  # type: ignore[attr-defined]
            adam.param_groups[0]["lr"] = host.param_groups[0]["lr"] = rate
            adam.step()
            host.step()
    for weight, parameter in zip(weights, right):
        master = host.get_unscaled_state(weight, "master_param")
        torch.testing.assert_close(master, parameter.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weight, master.to(dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            mine = host.get_unscaled_state(weight, name)
            torch.testing.assert_close(mine, adam.state[parameter][name], rtol=1e-5, atol=1e-7)
        assert float(host.get_unscaled_state(weight, "step")) == 3.0


def test_a_weight_without_gradient_stays() -> None:
    weight = torch.ones(5)
    HostAdamW([group_of([weight])]).step()
    assert torch.equal(weight, torch.ones(5))


def test_a_gradient_that_is_not_finite_is_skipped(pool: RankPool, models: dict[str, Path]) -> None:
    config = settings(optim={"optimizer_cpu_offload": True})
    metrics, untouched = pool.run(training.poisoned, 1, config, models["qwen2"], sequences(4))[0]
    assert untouched and metrics["actor/skipped_steps"] == 1.0


def test_sft_a_reset_and_rl_go_as_with_the_device_optimizer(pool: RankPool, models: dict[str, Path]) -> None:
    """A reset makes new moments from the present weights, and leaves the optimizer where it is."""
    batch = sequences(5, seed=4)
    runs = [
        pool.run(training.supervised, 1, settings(optim=optim), models["qwen2"], batch, 3)[0]
        for optim in ({}, {"optimizer_cpu_offload": True})
    ]
    (right, right_rl, _), (mine, mine_rl, _) = runs
    for one, other in zip(mine, right, strict=True):
        assert one["sft/loss"] == pytest.approx(other["sft/loss"], abs=1e-5)
    for key in ("actor/policy_loss", "actor/grad_norm"):
        assert mine_rl[key] == pytest.approx(right_rl[key], rel=1e-4, abs=1e-5)


def test_memory_can_still_go_to_an_engine_between_steps(pool: RankPool, models: dict[str, Path]) -> None:
    batches = [sequences(4, seed=i) for i in range(3)]
    config = settings(model=BF16, optim={"optimizer_cpu_offload": True})
    expected = pool.run(training.train, 1, config, models["qwen2"], batches)[0]
    for name in ("offload_optimizer", "offload_weight", "offload_grad"):
        setattr(config[0], name, True)
    history, away = pool.run(training.train_with_turns, 1, config, models["qwen2"], batches)[0]
    assert away
    for mine, right in zip(history, expected, strict=True):
        assert mine["actor/policy_loss"] == right["actor/policy_loss"]
        assert mine["actor/grad_norm"] == right["actor/grad_norm"]


def test_refused_without_the_distributed_optimizer(models: dict[str, Path]) -> None:
    actor = settings(optim={"optimizer_cpu_offload": True, "use_distributed_optimizer": False})[0]
    with pytest.raises(ValueError, match=r"actor\.optim\.optimizer_cpu_offload=True needs the shards of"):
        check_layout(actor, ModelConfig.from_directory(models["qwen2"]), 1)
