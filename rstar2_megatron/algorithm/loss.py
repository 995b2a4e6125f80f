"""Policy losses on flat tokens, and their aggregation over a mini-batch.

Paper (arXiv 2508.20722) Eq. 6-7, over the kept trajectories, without KL and entropy terms:
`1 / sum_i |o_i| * sum_i sum_t min(r A, clip(r, 1 - 0.2, 1 + 0.28) A)`. The dual clip is not in the paper;
both public codes have it.

A loss of `POLICY_LOSSES`, or of the user's, gives a value to each token. The caller computes the denominator of the whole
mini-batch (all ranks, all micro-batches) with `aggregate`, passes it to `policy_loss` for every micro-batch, and sums losses
and metrics. The result does not depend on how the trajectories are split, if the loss of a token depends on its own sequence
only (`layout_check`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rstar2_megatron.settings.schema import AlgorithmSettings

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far outside every clip and finite in fp32


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
    """Weights and denominator of a mini-batch under `kind`, a value of `algorithm.loss_agg_func`.

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
    Raises ValueError where `mini_batch_rows` is missing.
    """
    counts = torch.as_tensor(token_counts, dtype=torch.float64)
    trained = counts > 0
    if kind == "token-mean":
        return Aggregation(torch.ones_like(counts), max(counts.sum().item(), 1.0))
    if kind.startswith("seq-mean"):
        weights = torch.ones_like(counts) if kind == "seq-mean-token-sum" else _inverse(counts)
        return Aggregation(weights, max(trained.sum().item(), 1.0))

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


# ------------------------------------------------------------------------------------------------ losses of tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """The n trained tokens that a rank has of a micro-batch of s sequences.

    Context parallelism spreads the tokens of a sequence over ranks; `sequence_sum` adds them up.
    """

    logprobs: Tensor  # [n] of the policy that is trained, with gradient
    old_logprobs: Tensor  # [n] of the policy that generated the tokens, or recomputed by the actor, without gradient
    rollout_logprobs: Tensor  # [n] of the engine
    advantages: Tensor  # [n] the advantage of the token's trajectory, or of its turn (algorithm.turn_returns)
    entropy: Tensor  # [n] of the policy; with gradient if algorithm.entropy_bonus is set
    sequence: Tensor  # [n] int64, the token's sequence: 0 to s - 1
    position: Tensor  # [n] int64, the token's place in prompt and response
    num_sequences: int
    settings: AlgorithmSettings
    across_ranks: Callable[[Tensor], Tensor] = lambda values: values
    """Sums a tensor over the ranks that share the sequences, with gradient. All of them call it equally often."""

    @property
    def ratio(self) -> Tensor:
        """[n] policy / old policy, with gradient."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[s] sums of `values` [n] over all tokens of each sequence, also those of other ranks, with gradient.

        `sequence_sum(values)[tokens.sequence]` gives each token its sequence's sum.
        """
        return self.across_ranks(values.new_zeros(self.num_sequences).index_add(0, self.sequence, values))


PolicyLoss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
"""The loss of each token, [n] with gradient, and named values [n], whose means over all tokens are metrics.

`clipped` and `dual_clipped`, 1 where the loss of a token was cut, are `actor/clip_fraction` and `actor/dual_clip_fraction`;
other names are `actor/loss/{name}`. A function of the user's may return the losses alone.
"""


def clipped(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-r A, -clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A), for A < 0 at most clip_ratio_c |A| (dual clip)."""
    loss, values = _clipped(tokens, tokens.ratio)
    if tokens.settings.clip_ratio_c is not None:
        advantage = tokens.advantages.to(tokens.logprobs.dtype)
        bound = -advantage * tokens.settings.clip_ratio_c
        values["dual_clipped"] = (advantage < 0) & (loss > bound)
        loss = torch.where(values["dual_clipped"], bound, loss)
    return loss, values


def gspo(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-s A, -clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high) A) on each token of a sequence, with the ratio s of the
    whole sequence: s = exp(mean over its trained tokens of the log ratio). GSPO, arXiv 2507.18071, equations 5 and 7.
    """
    return _clipped(tokens, _sequence_ratio(tokens)[tokens.sequence])


def gspo_token(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """As `gspo`, with s_t = sg(s) pi / sg(pi): its value and clipping, the gradient of each token alone. Equations 13, 14."""
    ratio = _sequence_ratio(tokens).detach()[tokens.sequence]
    return _clipped(tokens, ratio * (tokens.logprobs - tokens.logprobs.detach()).exp())


def cispo(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log pi: the weight is cut, every token keeps its gradient.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5. The paper bounds r from above alone: clip_ratio_low near 1.
    """
    low, high = 1.0 - tokens.settings.clip_ratio_low, 1.0 + tokens.settings.clip_ratio_high
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(low, high)
    return -weight * tokens.advantages.to(weight.dtype) * tokens.logprobs, {"clipped": weight != ratio}


def _sequence_ratio(tokens: Tokens) -> Tensor:
    """[s] exp of the mean log ratio of each sequence, with gradient; 1 for a sequence without a token."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    count = tokens.sequence_sum(torch.ones_like(log_ratio))
    return (tokens.sequence_sum(log_ratio) / count.clamp(min=1)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(tokens: Tokens, ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss of ratios [n], without a dual clip."""
    settings, advantage = tokens.settings, tokens.advantages.to(ratio.dtype)
    unclipped_loss = -advantage * ratio
    clipped_loss = -advantage * ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    return torch.maximum(unclipped_loss, clipped_loss), {"clipped": clipped_loss > unclipped_loss}


POLICY_LOSSES: dict[str, PolicyLoss] = {"clipped": clipped, "gspo": gspo, "gspo-token": gspo_token, "cispo": cispo}
"""By their names in `algorithm.policy_loss`."""


def value_key(name: str) -> str:
    """The name of a loss's value among the sums of `policy_loss`, where a value may be called `ratio` or `tokens` too."""
    return name if name in ("clipped", "dual_clipped") else f"loss/{name}"


def policy_loss(
    tokens: Tokens,
    loss: PolicyLoss,
    *,
    denominator: float,
    token_weights: Tensor | None = None,
    tis_weights: Tensor | None = None,
    entropy_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`loss` of one micro-batch, normalised so that the sum over micro-batches and ranks is the loss.

    denominator, token_weights: from `aggregate`; `token_weights` [n] repeats the sequence weight on its tokens.
    tis_weights: [n] truncated importance weights between engine and actor, from `correction.tis_weights`.
    entropy_mask: [n] 1 where `algorithm.entropy_bonus` counts, else 0; None: everywhere. The denominator is the same.

    Returns the loss (0-dim; zero with a gradient of zeros when nothing is trained) and detached 0-dim sums over the
    tokens, to be summed over micro-batches and ranks and divided by `tokens`: `tokens`, `ratio`, `approx_kl` (old - new, the
    k1 estimate), `entropy`, `pg_loss` (before any weight), and the loss's own values by `value_key`.
    """
    token_loss, values = loss(tokens)
    objective = token_loss
    if tis_weights is not None:
        objective = objective * tis_weights.detach()
    if tokens.settings.entropy_bonus:
        entropy = tokens.entropy if entropy_mask is None else tokens.entropy * entropy_mask
        objective = objective - tokens.settings.entropy_bonus * entropy
    if token_weights is not None:
        objective = objective * token_weights.detach()
    with torch.no_grad():
        sums = {
            "tokens": token_loss.new_tensor(len(token_loss)).float(),
            "ratio": tokens.ratio.sum().float(),
            "approx_kl": (tokens.old_logprobs - tokens.logprobs).sum().float(),
            "pg_loss": token_loss.sum().float(),
            "entropy": tokens.entropy.sum().float(),
            **{value_key(name): value.sum().float() for name, value in values.items()},
        }
    return objective.sum() / denominator, sums
