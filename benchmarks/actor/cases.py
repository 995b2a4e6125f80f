"""Inputs of the actor's benchmarks: model shapes, random trajectories, an actor with random weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rstar2_megatron.actor.megatron_actor import MegatronActor
from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.settings.schema import ActorSettings, AlgorithmSettings, RunnerSettings

QWEN = {"num_hidden_layers": 28, "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 640,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        **QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        **QWEN,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "14b": {
        **QWEN,
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


def rollout_lengths(count: int, mean: int, seed: int = 0) -> list[int]:
    """Log-normal lengths, similar to those of rollouts, cut at four times the mean."""
    rng = random.Random(seed)
    return [min(4 * mean, max(16, int(rng.lognormvariate(0, 0.6) * mean / 1.2))) for _ in range(count)]


def make_sequences(lengths: list[int], vocab: int) -> list[TrainSequence]:
    """Random tokens. The first fifth is the prompt; four fifths of the rest are trained."""
    rng = random.Random(1)
    result = []
    for n in lengths:
        mask = np.array([i >= n // 5 and rng.random() < 0.8 for i in range(n)], np.uint8)
        mask[-1] = 1
        ids = np.array([rng.randrange(vocab) for _ in range(n)], np.int32)
        result.append(TrainSequence(ids, mask, -6.5 * mask.astype(np.float32), rng.choice([-1.0, 1.0])))
    return result


def settings_for(
    budget: int, threads: int, precision: str, *, host_optimizer: bool = False, **model: Any
) -> tuple[ActorSettings, RunnerSettings, AlgorithmSettings]:
    actor = ActorSettings.model_validate(
        {"model": {"precision": precision, **model}, "optim": {"optimizer_cpu_offload": host_optimizer}, "cpu_threads": threads}
    )
    runner = RunnerSettings.model_validate(
        {
            "experiment_name": "benchmark",
            "logger": {"log_path": "unused", "experiment_name": "benchmark"},
            "max_steps": 1,
            "seq_length": budget,
            "max_tokens_per_mbs": budget,
        }
    )
    algorithm = AlgorithmSettings.model_validate(
        {
            "group_size": 1,
            "down_sampling": {"down_sampling_config": {"down_sample_to_n": 1}},
            "sampling_params": {"max_new_tokens": budget},
        }
    )
    return actor, runner, algorithm


def write_config(directory: Path, shape: dict[str, Any]) -> Path:
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, **shape}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def start_actor(rank: int, world: int, port: int, device: str, config: Any, model_path: Path) -> MegatronActor:
    """An actor with random weights; it needs no weights on disk."""
    from rstar2_megatron.cpu.megatron import install

    install()
    from rstar2_megatron.actor import policy

    def random_weights(chunks: list[Any], *_: Any) -> None:
        torch.manual_seed(0)
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.02)

    policy.load_hf_weights = random_weights  # type: ignore[assignment]
    actor = MegatronActor(
        *config,
        model_path=str(model_path),
        rank=rank,
        world_size=world,
        init_method=f"tcp://127.0.0.1:{port}",
        device=device,  # type: ignore[arg-type]
    )
    actor.initialize()
    return actor


def transformers_step(model: Any, adam: Any, sequences: list[TrainSequence], budget: int, device: str) -> None:
    """A training step with transformers: padded micro-batches, full logits, the same loss and optimizer."""
    trained = sum(s.num_trained_tokens for s in sequences)
    adam.zero_grad()
    waiting = list(sequences)
    while waiting:
        batch: list[TrainSequence] = []
        while waiting and (len(batch) + 1) * max(s.length for s in [*batch, waiting[0]]) <= budget:
            batch.append(waiting.pop(0))
        longest = max(s.length for s in batch)

        def padded(name: str, longest: int = longest, batch: list[TrainSequence] = batch) -> torch.Tensor:
            rows = [list(getattr(s, name)) + [0] * (longest - s.length) for s in batch]
            return torch.tensor(rows, device=device)

        ids, mask = padded("input_ids").long(), padded("loss_mask")[:, 1:]
        keep = torch.tensor([[1] * s.length + [0] * (longest - s.length) for s in batch], device=device)
        logits = model(input_ids=ids, attention_mask=keep, use_cache=False).logits[:, :-1].float()
        chosen = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
            mask.shape
        )
        ratio = (chosen - padded("rollout_logprobs")[:, 1:]).clamp(-20, 20).exp()
        advantage = torch.tensor([s.advantage for s in batch], device=device)[:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (-(gain * mask).sum() / trained).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
