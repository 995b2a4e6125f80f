"""Loss functions for the pipeline schedule, and the metrics of a step.

A loss function gets the micro-batch and the model's output, fp32 [2, n]: log-probs and entropies of the wanted tokens. It
returns the loss, already divided by its global denominator, and named values. The values of SUMS are summed over
micro-batches and ranks, those of MAXIMA are reduced by maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rstar2_megatron.algorithm.correction import tis_weights
from rstar2_megatron.algorithm.kl import kl_estimate
from rstar2_megatron.algorithm.loss import Aggregation, PolicyLoss, Tokens, policy_loss
from rstar2_megatron.settings.schema import AlgorithmSettings

LossFunction = Callable[[Any, Tensor], tuple[Tensor, dict[str, Tensor]]]

# A rank without a value contributes zero.
SUMS = (
    "loss", "tokens", "ratio", "clipped", "dual_clipped", "approx_kl", "pg_loss", "entropy",
    "tis_ratio", "tis_clipped", "logprob_diff", "rollout_kl", "reference_kl", "pair_accuracy", "pair_margin",
    "after_tool_entropy", "after_tool_tokens",
)  # fmt: skip
MAXIMA = ("tis_ratio_max", "logprob_diff_max")
AFTER_TOOL = 8
"""Tokens behind a tool response whose entropy is a metric."""


class FlatLogProbs:
    """Log-probs of many sequences, or other numbers of their tokens, in one flat tensor, one entry per token."""

    def __init__(self, lengths: list[int], device: str) -> None:
        self.lengths = lengths
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self.starts = ends[:-1]
        self.values = torch.zeros(int(ends[-1]), device=device)

    def put(self, sequence: Tensor, place: Tensor, values: Tensor) -> None:
        self.values[(self.starts[sequence] + place).to(self.values.device)] = values

    def of(self, sequence: Tensor, place: Tensor) -> Tensor:
        return self.values[(self.starts[sequence] + place).to(self.values.device)]

    def to_arrays(self) -> list[np.ndarray]:
        """float32, one array a sequence."""
        return np.split(self.values.numpy(force=True), self.starts.tolist()[1:])


def _first(count: int, behind_tool: Tensor) -> Tensor:
    """bool [n]: the first `count` tokens behind each tool response."""
    return (behind_tool > 0) & (behind_tool <= count)


def sft_loss(divisor: float) -> LossFunction:
    """Cross entropy of the wanted tokens, summed and divided by `divisor`."""

    def loss(batch: Any, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        total = -output[0].sum()
        sums = {"loss": total.detach() / divisor, "pg_loss": total.detach(), "entropy": output[1].sum().detach()}
        return total / divisor, sums

    return loss


def rl_loss(
    algorithm: AlgorithmSettings,
    token_loss: PolicyLoss,
    weights: Aggregation,
    device: str,
    old: FlatLogProbs | None,
    reference: FlatLogProbs | None,
    first: int,
    across_ranks: Callable[[Tensor], Tensor],
) -> LossFunction:
    """The policy loss of a mini-batch whose first sequence is number `first` of the step's batch.

    `token_loss`: the loss of each token. `across_ranks`: `Policy.context_sum`.
    `old`: recomputed log-probs of the step's sequences. Without `old`, `recompute_logprobs` uses the current log-probs,
    which is exact for a single mini-batch: the weights have not been updated since.
    `reference`: log-probs of the frozen reference for the KL term, which has the token weights of the policy loss.
    """
    per_sequence = weights.sequence_weights.to(device, torch.float32)

    def loss(batch: Any, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, entropy = output[0], output[1]
        before = log_probs.detach() if old is None else old.of(batch.sequence + first, batch.place)
        clip = math.inf if algorithm.decoupled_loss else algorithm.importance_sampling_clip
        correction, sums = tis_weights(before, batch.rollout_logprobs, clip)
        token_weights = per_sequence[batch.sequence.to(device)]
        local = torch.zeros(len(per_sequence), dtype=torch.long)
        local[list(batch.members)] = torch.arange(len(batch.members))
        tokens = Tokens(
            logprobs=log_probs,
            old_logprobs=before if algorithm.recompute_logprobs else batch.rollout_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            entropy=entropy if algorithm.entropy_bonus else entropy.detach(),
            sequence=local[batch.sequence].to(device),
            position=batch.place.to(device),
            num_sequences=len(batch.members),
            settings=algorithm,
            across_ranks=across_ranks,
        )
        explored = algorithm.entropy_bonus_tokens
        value, loss_sums = policy_loss(
            tokens,
            token_loss,
            denominator=weights.denominator,
            token_weights=token_weights,
            tis_weights=correction if algorithm.importance_sampling_fix or algorithm.decoupled_loss else None,
            entropy_mask=None if explored is None else _first(explored, batch.behind_tool),
        )
        if reference is not None:
            there = reference.of(batch.sequence + first, batch.place)
            kl = kl_estimate(log_probs, there, algorithm.kl_penalty_type, algorithm.kl_clamp)
            value = value + algorithm.kl_beta * (token_weights * kl).sum() / weights.denominator
            sums["reference_kl"] = kl.detach().sum()
        behind = _first(AFTER_TOOL, batch.behind_tool)
        sums |= {"after_tool_entropy": entropy.detach()[behind].sum(), "after_tool_tokens": behind.sum()}
        return value, {**sums, **loss_sums, "loss": value.detach()}

    return loss


def rl_metrics(steps: list[dict[str, float]], *, with_reference: bool, names: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of a training step from the reduced sums of its mini-batches: means over the tokens of all mini-batches.

    Differences between engine and actor are measured on the first mini-batch, before any update. with_reference: report
    the KL term. names: of the loss's own values among the sums (`algorithm.loss.value_key`).
    """
    tokens = max(sum(s["tokens"] for s in steps), 1.0)
    first, first_tokens = steps[0], max(steps[0]["tokens"], 1.0)
    behind = sum(s["after_tool_tokens"] for s in steps)

    def mean(name: str) -> float:
        return sum(s[name] for s in steps) / tokens

    return {
        "actor/policy_loss": sum(s["loss"] for s in steps) / len(steps),
        "actor/grad_norm": sum(s["grad_norm"] for s in steps) / len(steps),
        "actor/lr": steps[-1]["lr"],
        "actor/ratio": mean("ratio"),
        "actor/clip_fraction": mean("clipped"),
        "actor/dual_clip_fraction": mean("dual_clipped"),
        "actor/approx_kl": mean("approx_kl"),
        "actor/entropy": mean("entropy"),
        **({"actor/entropy_after_tool": sum(s["after_tool_entropy"] for s in steps) / behind} if behind else {}),
        "actor/logprob_diff_mean": first["logprob_diff"] / first_tokens,
        "actor/logprob_diff_max": first["logprob_diff_max"],
        "actor/rollout_kl": first["rollout_kl"] / first_tokens,
        "actor/tis_ratio": first["tis_ratio"] / first_tokens,
        "actor/tis_ratio_max": first["tis_ratio_max"],
        "actor/tis_clip_fraction": first["tis_clipped"] / first_tokens,
        **{f"actor/{name}": mean(name) for name in names if name not in SUMS},
        **({"actor/reference_kl": mean("reference_kl")} if with_reference else {}),
        "actor/trained_tokens": tokens,
    }


def sft_metrics(step: dict[str, float], trained: int, skipped: int, speed: dict[str, float]) -> dict[str, float]:
    """Metrics of a supervised step from its reduced sums; `speed` holds metrics named `actor/...`."""
    return {
        "sft/loss": step["loss"],
        "sft/token_loss": step["pg_loss"] / trained,
        "sft/entropy": step["entropy"] / trained,
        "sft/grad_norm": step["grad_norm"],
        "sft/lr": step["lr"],
        "sft/trained_tokens": float(trained),
        "sft/skipped_steps": float(skipped),
        **{name.replace("actor/", "sft/", 1): value for name, value in speed.items()},
    }
