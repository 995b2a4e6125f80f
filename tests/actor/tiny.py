"""A tiny random model, fixed trajectories and settings shared by the actor's tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.settings.schema import ActorSettings, AlgorithmSettings, RunnerSettings

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
# Low enough that the short trajectories of the tests lie on both sides of the original length.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def write_model(
    directory: Path,
    *,
    tie: bool = False,
    qwen3: bool = False,
    experts: dict[str, Any] | None = None,
    llama: dict[str, Any] | None = None,
    mistral: bool = False,
    seed: int = 0,
    **shape: Any,
) -> Path:
    """A Hugging Face directory with random weights; biases and norms too, so that a wrong mapping shows.

    llama: the rope_parameters of a Llama.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(seed)
    sizes = {**SHAPE, **shape}
    common: dict[str, Any] = {"tie_word_embeddings": tie, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    model: Any
    if experts is not None:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **common, **{**EXPERTS, **experts}, head_dim=24))
    elif llama is not None:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tie, rope_parameters=llama))
    elif mistral:
        model = MistralForCausalLM(MistralConfig(**sizes, **common, head_dim=24, sliding_window=None))
    elif qwen3:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **common, head_dim=24))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **common))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.1 if name.endswith("bias") else 0.08)
    model.float().save_pretrained(directory)
    return directory


def sequences(count: int, seed: int = 0, low: int = 20, high: int = 60, vocab: int = 320) -> list[TrainSequence]:
    """Ragged trajectories with masked spans, advantages of both signs, old log-probs that make clips act."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        n = rng.randint(low, high)
        prompt = rng.randint(4, n // 2)
        mask = [0] * prompt + [int(rng.random() < 0.8) for _ in range(n - prompt)]
        result.append(
            TrainSequence(
                input_ids=[rng.randrange(vocab) for _ in range(n)],
                loss_mask=mask,
                rollout_logprobs=[-5.8 + rng.gauss(0, 0.7) if m else 0.0 for m in mask],
                advantage=rng.choice([-1.0, -0.4, 0.7, 1.3]),
            )
        )
    return result


def settings(
    *, model: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **algorithm: Any
) -> tuple[ActorSettings, RunnerSettings, AlgorithmSettings]:
    actor = ActorSettings.model_validate(
        {
            "model": {"precision": "fp32", **(model or {})},
            "optim": {"lr": 1e-3, **(optim or {})},
            "lr_sched": {"lr_warmup_iters": 2},
        }
    )
    runner = RunnerSettings.model_validate(
        {
            "experiment_name": "test",
            "logger": {"log_path": "unused", "experiment_name": "test"},
            "max_steps": 5,
            "seq_length": 64,
            "max_tokens_per_mbs": 256,
        }
    )
    whole = {
        "group_size": 4,
        "down_sampling": {"down_sampling_config": {"down_sample_to_n": 2}},
        "sampling_params": {"max_new_tokens": 64, "temperature": 0.9},
        **algorithm,
    }
    return actor, runner, AlgorithmSettings.model_validate(whole)
