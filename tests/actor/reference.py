"""The same training on one process with transformers and torch alone: what every layout must reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rstar2_megatron.algorithm.batch import TrainSequence
from rstar2_megatron.settings.schema import ActorSettings, AlgorithmSettings


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")


def log_probs(model: Any, sequence: TrainSequence, temperature: float) -> Tensor:
    """[length - 1] log-probs of tokens 1.., one sequence at a time: no packing, no padding, no chunking."""
    ids = torch.tensor([sequence.input_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    chosen: Tensor = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return chosen


def rl_loss(model: Any, batch: list[TrainSequence], algorithm: AlgorithmSettings) -> Tensor:
    """Token mean over the whole batch of the clipped, dual-clipped policy loss, written out."""
    low, high, c = algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c
    total = torch.zeros(())
    for sequence in batch:
        ratio = (
            log_probs(model, sequence, algorithm.sampling_params.temperature)
            - torch.tensor(sequence.rollout_logprobs[1:])
        ).exp()
        advantage = sequence.advantage
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if advantage < 0 and c is not None:
            gain = gain.clamp(min=c * advantage)
        total = total - (gain * torch.tensor(sequence.loss_mask[1:])).sum()
    return total / sum(s.num_trained_tokens for s in batch)


def train(
    model: Any, batches: list[list[TrainSequence]], actor: ActorSettings, algorithm: AlgorithmSettings
) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of one optimizer step per batch."""
    optim, warmup = actor.optim, actor.lr_sched.lr_warmup_iters
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        groups, lr=optim.lr, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_eps
    )
    history = []
    for step, batch in enumerate(batches):
        for group in adam.param_groups:
            group["lr"] = actor.optim.lr * min(1.0, (step + 1) / warmup)
        adam.zero_grad()
        loss = rl_loss(model, batch, algorithm)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        adam.step()
        history.append((float(loss.detach()), float(norm)))
    return history
