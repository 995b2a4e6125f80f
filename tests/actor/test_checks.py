"""Refusals before anything starts, the arithmetic of a model's shape, and torch profiles."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rstar2_megatron.actor.layout import check_layout
from rstar2_megatron.actor.optimizer import learning_rate
from rstar2_megatron.actor.profile import TorchProfile
from rstar2_megatron.model.known_models import known_model
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import LrSchedSettings, OptimSettings, ProfilerSettings
from tests.actor.reference import load
from tests.actor.tiny import SHAPE, settings

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, **SHAPE}
MODEL = ModelConfig.from_dict(QWEN2)


def test_a_good_layout_is_resolved() -> None:
    actor, runner, _ = settings(
        model={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    )
    layout = check_layout(actor, MODEL, 16, runner)
    assert (layout.tensor, layout.pipeline, layout.context, layout.data, layout.virtual) == (2, 2, 2, 2, 1)


@pytest.mark.parametrize(
    "ranks, model, message",
    [
        (4, {"tensor_model_parallel_size": 4}, r"tensor_model_parallel_size=4 .*key/value heads \(2\); set it to 2"),
        (3, {"tensor_model_parallel_size": 3}, r"=3 does not divide the model's attention heads \(4\); set it to 2"),
        (3, {"pipeline_model_parallel_size": 3}, r"4 layers do not divide into 3 pipeline stages"),
        (3, {"tensor_model_parallel_size": 2}, r"3 actor ranks do not divide by tensor 2 x pipeline 1 x context 1 = 2"),
        (2, {"virtual_pipeline_model_parallel_size": 2}, r"virtual_pipeline_model_parallel_size=2 needs"),
        (1, {"sequence_parallel": True}, r"sequence_parallel=True needs tensor parallelism"),
        (1, {"recompute_granularity": "full"}, r"recompute_method \(uniform or block\)"),
    ],
)
def test_impossible_layouts_are_refused(ranks: int, model: dict[str, Any], message: str) -> None:
    actor, runner, _ = settings(model=model)
    with pytest.raises(ValueError, match=message):
        check_layout(actor, MODEL, ranks, runner)


EXPERTS = ModelConfig.from_dict(
    {
        **QWEN2,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
)


@pytest.mark.parametrize(
    "ranks, model, message",
    [
        (4, {"expert_model_parallel_size": 4}, r"=4 does not divide the model's 6 experts; set it to 3"),
        (
            2,
            {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            r"2 actor ranks do not divide by expert 2 x pipeline 2 = 4",
        ),
        (2, {"tensor_model_parallel_size": 2}, r"once per tensor rank; set actor.model.sequence_parallel=True"),
    ],
)
def test_impossible_expert_layouts_are_refused(ranks: int, model: dict[str, Any], message: str) -> None:
    actor, runner, _ = settings(model=model)
    with pytest.raises(ValueError, match=message):
        check_layout(actor, EXPERTS, ranks, runner)


def test_contradicting_settings_are_refused() -> None:
    actor, runner, _ = settings(
        model={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 9,
            "pipeline_model_parallel_size": 2,
        },
        optim={"use_distributed_optimizer": False, "overlap_param_gather": True, "min_lr": 1.0},
    )
    schedule = LrSchedSettings(lr_warmup_iters=5, lr_decay_style="cosine", lr_decay_iters=5)
    actor = actor.model_copy(update={"offload_weight": True, "lr_sched": schedule})
    with pytest.raises(ValueError) as refusal:
        check_layout(actor, MODEL, 2, runner)
    for part in (
        "recompute_num_layers=9 exceeds the 2 layers",
        "offload_weight=True needs",
        "overlap_param_gather=True needs",
        "min_lr=1.0 exceeds",
        "lr_decay_iters=5 ends before the warm-up",
    ):
        assert part in str(refusal.value)


def test_experts_of_mixed_layers_are_refused() -> None:
    raw = {**QWEN2, "architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}
    with pytest.raises(ValueError, match=r"mlp_only_layers=\[0\] is not supported"):
        ModelConfig.from_dict(raw)


def test_a_sequence_must_fit_a_micro_batch() -> None:
    actor, runner, _ = settings()
    runner = runner.model_copy(update={"seq_length": 300})
    with pytest.raises(ValueError, match=r"seq_length=300 .*max_tokens_per_mbs=256 .*at least 300"):
        check_layout(actor, MODEL, 1, runner)
    actor, _, _ = settings(model={"context_parallel_size": 2})
    assert check_layout(actor, MODEL, 2, runner).context == 2


def test_all_problems_are_told_at_once() -> None:
    actor, runner, _ = settings(model={"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 3})
    with pytest.raises(ValueError) as refusal:
        check_layout(actor, MODEL, 8, runner)
    assert len(str(refusal.value).splitlines()) >= 3


def test_dry_run_needs_no_torch() -> None:
    program = (
        "import sys, rstar2_megatron.actor.layout, rstar2_megatron.actor.packing;"
        "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_rope_theta_in_both_forms() -> None:
    assert MODEL.rope_theta == 1e6
    new = {k: v for k, v in QWEN2.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert ModelConfig.from_dict(new).rope_theta == 5e5


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            r"GemmaForCausalLM is not supported; supported: Qwen2ForCausalLM.*LlamaForCausalLM.*add_a_model",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, r"sliding_window=4096; only full"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, r"mlp_bias=True is not supported; supported: False"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope type llama3 lacks low_freq_factor"),
        ({"num_attention_heads": None}, r"config.json: num_attention_heads=None, expected a whole number"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, r"rope type yarn"),
        ({"use_sliding_window": True}, r"use_sliding_window"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not supported; supported: silu"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**QWEN2, **change})


def test_missing_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist: give a Hugging Face model directory"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("which", ["qwen2", "qwen2-tied", "qwen3", "moe", "moe-tied", "llama", "llama-tied", "mistral"])
def test_parameter_count_is_transformers(models: dict[str, Path], which: str) -> None:
    config = ModelConfig.from_directory(models[which])
    assert config.num_parameters == sum(p.numel() for p in load(models[which]).parameters())


def test_flops_of_a_known_model() -> None:
    """Qwen2.5-7B at segments of 4,096 tokens: 44.9 GFLOP a token by the usual formula."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        }
    )
    assert config.num_parameters == pytest.approx(7.62e9, rel=1e-3)
    assert config.train_flops([4096]) / 4096 == pytest.approx(44.9e9, rel=2e-3)
    assert config.train_flops([4096], trained_tokens=0) < config.train_flops([4096])


def test_only_the_chosen_experts_count_as_flops() -> None:
    """Qwen3-30B-A3B: 30.5 B parameters, 3.35 B of them at work on a token (embedding included)."""
    config = known_model("Qwen3-30B-A3B")
    assert config is not None
    assert config.num_parameters == pytest.approx(30.53e9, rel=1e-3)
    assert config.matmul_parameters + config.vocab_size * config.hidden_size == pytest.approx(3.35e9, rel=1e-2)


def test_learning_rate_schedule() -> None:
    optim = OptimSettings(lr=1.0, min_lr=0.1)
    constant = LrSchedSettings(lr_warmup_iters=4)
    assert [learning_rate(i, optim, constant, 10) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = LrSchedSettings(lr_warmup_iters=2, lr_decay_style="cosine")
    rates = [learning_rate(i, optim, cosine, 10) for i in range(14)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.55)
    assert rates[10:] == pytest.approx([0.1] * 4)
    assert all(a >= b for a, b in itertools.pairwise(rates[2:]))
    # A run of 10 steps that continues with an optimizer after its 30th step: no second warm-up, a cosine of its own.
    later = [learning_rate(i, optim, cosine, 10, start=30) for i in range(30, 44)]
    assert later[0] == 1.0 and later[5] == pytest.approx(0.55) and later[10:] == pytest.approx([0.1] * 4)
    assert learning_rate(30, optim, constant, 10, start=30) == 1.0


def test_settings_are_json(tmp_path: Path) -> None:
    """Settings travel to the ranks pickled; a copy through JSON must be the same (no hidden state)."""
    actor, _, _ = settings()
    assert type(actor).model_validate(json.loads(actor.model_dump_json())) == actor


def test_a_profile_holds_the_operations_of_its_time(tmp_path: Path) -> None:
    settings = ProfilerSettings(steps=3, record_shapes=True)  # also "cuda", which is left out here
    assert settings.steps == [3]
    recording = TorchProfile(settings)
    _ = torch.ones(3, 5) @ torch.ones(5, 7)
    recording.write(tmp_path / "step_3" / "actor_rank_0.json.gz")
    _ = torch.ones(3).cumsum(0)
    events = json.loads(gzip.decompress((tmp_path / "step_3" / "actor_rank_0.json.gz").read_bytes()))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert products and products[0]["args"]["Input Dims"] == [[3, 5], [5, 7]]
    assert not [event for event in events if event.get("name") == "aten::cumsum"]
