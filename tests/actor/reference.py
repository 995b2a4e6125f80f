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


def log_probs_entropy(model: Any, sequence: TrainSequence, temperature: float) -> tuple[Tensor, Tensor]:
    """[length - 1] log-probs of tokens 1.. and entropies; one sequence, no packing, padding or chunking."""
    ids = torch.tensor(sequence.input_ids).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, ids[0, 1:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def log_probs(model: Any, sequence: TrainSequence, temperature: float) -> Tensor:
    """[length - 1] log-probs of tokens 1.."""
    return log_probs_entropy(model, sequence, temperature)[0]


def rl_loss(model: Any, batch: list[TrainSequence], algorithm: AlgorithmSettings, frozen: Any = None) -> Tensor:
    """Token mean over the whole batch of the clipped, dual-clipped policy loss, written out.

    With its entropy term, and with `frozen` also its KL term to that model.
    """
    low, high, c = algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c
    total = torch.zeros(())
    for sequence in batch:
        temperature = algorithm.sampling_params.temperature
        scores, entropy = log_probs_entropy(model, sequence, temperature)
        ratio = (scores - torch.tensor(sequence.rollout_logprobs[1:])).exp()
        advantage = torch.tensor(sequence.advantage, dtype=torch.float32).expand(sequence.length)[1:]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        if c is not None:
            gain = torch.where(advantage < 0, gain.maximum(c * advantage), gain)
        if frozen is not None:
            with torch.no_grad():
                d = log_probs(frozen, sequence, temperature)
            d = d - scores
            kl = d.exp() - d - 1 if algorithm.kl_penalty_type == "low_var_kl" else d * d / 2
            gain = gain - algorithm.kl_beta * kl
        gain = gain + algorithm.entropy_bonus * entropy * explored(sequence, algorithm.entropy_bonus_tokens)
        total = total - (gain * torch.tensor(sequence.loss_mask[1:])).sum()
    return total / sum(s.num_trained_tokens for s in batch)


def explored(sequence: TrainSequence, count: int | None) -> Tensor:
    """[length - 1] 1 for the tokens that the entropy bonus is for, by a walk over the tokens."""
    marks, turn, place = [], 0, 0
    for before, here in zip(sequence.loss_mask, sequence.loss_mask[1:]):
        turn, place = (turn + 1, 0) if here and not before else (turn, place + 1)
        marks.append(1.0 if count is None or (here and turn > 1 and place < count) else 0.0)
    return torch.tensor(marks)


def train(
    model: Any, batches: list[list[TrainSequence]], actor: ActorSettings, algorithm: AlgorithmSettings, frozen: Any = None
) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of one optimizer step per batch."""
    optim, warmup = actor.optim, actor.lr_sched.lr_warmup_iters
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_eps)
    history = []
    for step, batch in enumerate(batches):
        for group in adam.param_groups:
            group["lr"] = actor.optim.lr * min(1.0, (step + 1) / warmup)
        adam.zero_grad()
        loss = rl_loss(model, batch, algorithm, frozen)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        adam.step()
        history.append((float(loss.detach()), float(norm)))
    return history
