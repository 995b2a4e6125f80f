"""The GRPO-RoC policy loss on flat tokens, and its aggregation over a mini-batch.

Paper (arXiv 2508.20722) Eq. 6-7, over the kept trajectories, without KL and entropy terms:
`1 / sum_i |o_i| * sum_i sum_t min(r A, clip(r, 1 - 0.2, 1 + 0.28) A)`. The dual clip is not in the paper;
both public codes have it.

The functions do not depend on ranks or micro-batches. The caller computes the denominator of the whole mini-batch (all
ranks, all micro-batches) with `aggregate`, passes it to `policy_loss` for every micro-batch, and sums losses and metrics.
The result does not depend on how the trajectories are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far outside every clip and finite in fp32

LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "released-verl", "released-rlinf")


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The loss of a mini-batch is `sum_s sum_t sequence_weights[s] * loss[s, t] / denominator`.

    `sequence_weights`, float64 `[sequences]`, has the order of the counts given to `aggregate`.
    """

    sequence_weights: Tensor
    denominator: float


def aggregate(
    kind: str,
    token_counts: Sequence[int],
    *,
    microbatch_of: Sequence[int] | None = None,
    num_microbatches: int | None = None,
    mini_batch_rows: int | None = None,
) -> Aggregation:
    """Weights and denominator of a mini-batch.

    token_counts: trained tokens of every sequence of the mini-batch, over all ranks. Sequences without a
        trained token have weight 0 and are not counted.
    microbatch_of: for the released kinds, the globally unique micro-batch index of every sequence.
    num_microbatches: for `released-rlinf`, micro-batches x data-parallel ranks, empty ones included; None
        takes the distinct values of `microbatch_of`.
    mini_batch_rows: for `released-verl`, rows of a full mini-batch, `problems * group_size / updates` before
        down-sampling and rejection. The released code divides by it, so the gradient shrinks as groups are rejected.

    - token-mean: all trained tokens of the mini-batch have the same weight (the paper).
    - seq-mean-token-mean: all sequences have the same weight, divided over their tokens (the first GRPO).
    - seq-mean-token-sum: token sums averaged over sequences.
    - released-verl: token mean inside a micro-batch, weighted by rows / mini_batch_rows.
    - released-rlinf: token mean inside a micro-batch, all micro-batches of all ranks have the same weight.
    Raises ValueError for an unknown kind or missing operands.
    """
    counts = torch.as_tensor(token_counts, dtype=torch.float64)
    if (counts < 0).any():
        raise ValueError(f"negative token count in {list(token_counts)}")
    if kind not in LOSS_AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {kind!r}; known: {', '.join(LOSS_AGGREGATIONS)}")
    trained = counts > 0
    if kind == "token-mean":
        return Aggregation(torch.ones_like(counts), max(counts.sum().item(), 1.0))
    if kind.startswith("seq-mean"):
        weights = torch.ones_like(counts) if kind == "seq-mean-token-sum" else _inverse(counts)
        return Aggregation(weights, max(trained.sum().item(), 1.0))

    if microbatch_of is None or len(microbatch_of) != len(counts):
        raise ValueError(f"loss aggregation {kind!r} needs microbatch_of with {len(counts)} entries")
    distinct, place = torch.as_tensor(microbatch_of, dtype=torch.long).unique(return_inverse=True)
    tokens = counts.new_zeros(len(distinct)).index_add_(0, place, counts)
    if kind == "released-verl":
        if mini_batch_rows is None or mini_batch_rows < 1:
            raise ValueError(f"loss aggregation {kind!r} needs mini_batch_rows >= 1, got {mini_batch_rows}")
        rows = place.bincount(minlength=len(distinct))
        return Aggregation((rows * _inverse(tokens))[place], float(mini_batch_rows))
    return Aggregation(_inverse(tokens)[place], float(max(num_microbatches or len(distinct), 1)))


def _inverse(counts: Tensor) -> Tensor:
    """1 / count, 0 where the count is 0."""
    return torch.where(counts > 0, 1.0 / counts.clamp(min=1), 0.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_c: float | None = 3.0,
    token_weights: Tensor | None = None,
    tis_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_bonus: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss of one micro-batch, normalised so that the sum over micro-batches is the loss.

    All tensors are flat `[tokens]`; `advantages` repeats the trajectory's advantage on its tokens.

    logprobs: of the policy being trained, with gradient.
    old_logprobs: of the policy that generated the tokens, or recomputed by the actor, without gradient.
    mask: 1 or True on trained tokens; the other tensors may hold anything elsewhere, also NaN.
    denominator, token_weights: from `aggregate`; `token_weights` repeats the sequence weight on its tokens.
    clip_c: dual clip, the bound of a negative-advantage token's loss as a multiple of |A|; None turns it off.
    tis_weights: truncated importance weights between engine and actor, from `correction.tis_weights`.
    entropy: per-token entropy of the policy, with gradient if `entropy_bonus` > 0.

    Returns the loss (0-dim; zero with a gradient of zeros when nothing is trained) and detached 0-dim sums over the
    trained tokens, to be summed over micro-batches and ranks and divided by `tokens`:
    `tokens`, `ratio`, `clipped` (tokens whose gradient clip-low or clip-high removed), `dual_clipped`,
    `approx_kl` (old - new, the k1 estimate), `entropy` (when given), `pg_loss` (before any weight).
    Raises ValueError when shapes differ or the denominator is not positive.
    """
    tensors = {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
    optional = {"token_weights": token_weights, "tis_weights": tis_weights, "entropy": entropy}
    tensors.update({name: t for name, t in optional.items() if t is not None})
    for name, tensor in tensors.items():
        if tensor.shape != logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}")
    if not denominator > 0:
        raise ValueError(f"denominator must be positive, got {denominator}")
    if entropy_bonus and entropy is None:
        raise ValueError(f"entropy_bonus={entropy_bonus} needs the entropy of every token")

    trained = mask.bool()
    zero = logprobs.new_zeros(())
    # torch.where instead of a product with the mask: 0 * inf and 0 * nan are nan.
    log_ratio = torch.where(trained, logprobs - old_logprobs.detach(), zero)
    advantage = torch.where(trained, advantages.to(logprobs.dtype), zero)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    unclipped_loss = -advantage * ratio
    clipped_loss = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(unclipped_loss, clipped_loss)
    is_clipped = trained & (clipped_loss > unclipped_loss)
    if clip_c is not None:
        bound = -advantage * clip_c
        is_dual_clipped = trained & (advantage < 0) & (token_loss > bound)
        token_loss = torch.where(is_dual_clipped, bound, token_loss)
    else:
        is_dual_clipped = torch.zeros_like(trained)

    objective = token_loss
    if tis_weights is not None:
        objective = objective * torch.where(trained, tis_weights.detach(), zero)
    if entropy is not None and entropy_bonus:
        objective = objective - entropy_bonus * torch.where(trained, entropy, zero)
    if token_weights is not None:
        objective = objective * torch.where(trained, token_weights.detach(), zero)
    loss = torch.where(trained, objective, zero).sum() / denominator

    with torch.no_grad():
        sums = {
            "tokens": trained.sum().to(torch.float32),
            "ratio": torch.where(trained, ratio, zero).sum().float(),
            "clipped": is_clipped.sum().float(),
            "dual_clipped": is_dual_clipped.sum().float(),
            "approx_kl": -log_ratio.sum().float(),
            "pg_loss": torch.where(trained, token_loss, zero).sum().float(),
        }
        if entropy is not None:
            sums["entropy"] = torch.where(trained, entropy, zero).sum().float()
    return loss, sums
