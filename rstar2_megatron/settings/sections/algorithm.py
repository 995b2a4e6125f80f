"""Section `algorithm`: sampling, resampling, loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rstar2_megatron.extension.choice import name_or_code
from rstar2_megatron.extension.user_code import UserCode
from rstar2_megatron.settings.sections.base import Section

KL_ESTIMATORS = ("low_var_kl", "k3", "mse", "k2")
"""Values of `algorithm.kl_penalty_type` that are loss terms."""


def _band(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= 1 <= value[1]:
        raise ValueError(
            f"[{value[0]:g}, {value[1]:g}] is no band of ratios around 1: give [low, high] with 0 < low <= 1 <= high"
        )
    return value


Band = Annotated[tuple[float, float], AfterValidator(_band)]
"""[low, high] of the ratio actor / engine, both inside."""


FILTER_NAMES = ("void_turns", "failed_calls", "malformed_ending", "repeated_calls", "truncated")


class DownSamplingConfig(Section):
    reject_equal_reward: bool = True
    """Groups whose trajectories all have the same reward are not trained on: nothing in them is better than the rest."""
    roc_error_ratio: bool = True
    """Failed tool calls are a part of a trajectory's penalty; the next key: the form of its answer is the other part."""
    roc_answer_format: bool = True
    min_zero_reward_trace_num: int = Field(2, ge=0)
    """Negatives that are kept at least, where the group has so many; the next key: positives."""
    min_non_zero_reward_trace_num: int = Field(2, ge=0)
    down_sample_to_n: int = Field(ge=1)
    """G: trajectories kept of each group of `algorithm.group_size`."""
    mode: Annotated[str | UserCode, name_or_code("paper", "released", "max_variance", "uniform")] = "paper"
    """paper: positives sampled with probability inverse to penalty; released: lowest penalty first; max_variance: the
    rewards of largest variance (PODS); uniform: at random. Your own: path/to/file.py:name of a function
    rule(group, count, rng) -> indices of the kept trajectories (docs/extend.md).
    """
    penalty: Annotated[str | UserCode, name_or_code("paper", "released")] | None = None
    """What a trajectory's penalty is; null: as `mode`. Your own: penalty(trajectory) -> float | Penalty, at least 0."""
    penalty_epsilon: float = Field(0.01, gt=0)
    """Added to the penalty in `paper` mode, so that a clean trajectory has a finite weight."""


class DownSamplingSettings(Section):
    do_down_sampling: bool = True
    """False: no group is rejected either."""
    down_sampling_config: DownSamplingConfig


class SamplingParams(Section):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(ge=1)
    """Response budget of a trajectory in tokens, tool responses included."""


class OverlongSettings(Section):
    """DAPO's soft overlong punishment (`algorithm.credit.punishment`): it enters the advantages and nothing else."""

    buffer_tokens: int = Field(0, ge=0)
    """Last tokens of sampling_params.max_new_tokens in which the punishment grows from 0 to `penalty`. 0: none."""
    penalty: float = Field(1.0, gt=0)
    """Largest punishment, in units of reward."""


class TurnReturnsSettings(Section):
    """GTPO's advantages of turns in place of trajectories (`algorithm.credit`)."""

    discount: float | None = Field(None, gt=0, le=1)
    """Of the rewards of later turns, for each turn between, e.g. 0.9. null: one advantage a trajectory."""
    malformed_penalty: float = Field(0.0, ge=0)
    """Taken from the reward of a turn with a call that could not be run, in units of reward, e.g. 0.1."""


class RefillSettings(Section):
    """Adds problems when groups are rejected. Off as released: a step then trains on the groups that are left."""

    enabled: bool = False
    min_share: float = Field(0.5, gt=0, le=1)
    """Share of data.rollout_batch_size that must survive rejection."""
    max_extra: float = Field(1.0, gt=0)
    """Largest number of added problems of a step, as a share of data.rollout_batch_size."""


class AlgorithmSettings(Section):
    variant: Literal["paper", "released", "released-rlinf"] | None = None
    """Resampling, reward, aggregation and limits of one code, together (`settings/variant.py`): the paper, microsoft/rStar
    or RLinf's rstar2. The command line and the named YAML override its values one by one; null: every key by itself.
    """
    group_size: int = Field(ge=1)
    """Rollouts per problem before down-sampling (2G)."""
    n_minibatches: int = Field(1, ge=1)
    """Optimizer steps per training step."""
    adv_type: Annotated[str | UserCode, name_or_code("grpo", "grpo-no-std", "leave-one-out")] = "grpo"
    """grpo: (r - mean) / std over the kept group (the paper); grpo-no-std: without the std.
    leave-one-out: the mean is over the other trajectories. Your own: advantage(rewards, valid) (docs/extend.md).
    """
    overlong: OverlongSettings = OverlongSettings()
    turn_returns: TurnReturnsSettings = TurnReturnsSettings()
    policy_loss: Annotated[str | UserCode, name_or_code("clipped", "gspo", "gspo-token", "cispo")] = "clipped"
    """clipped: with clip_ratio_low, clip_ratio_high, clip_ratio_c; gspo, gspo-token: ratios of whole sequences, with clips
    of the size of 3e-4; cispo: the clipped ratio as a weight. Your own: loss(tokens) -> losses (docs/extend.md).
    """
    trajectory_filters: list[Annotated[str | UserCode, name_or_code(*FILTER_NAMES)]] = []
    """What is counted and not resampled: void_turns, failed_calls, malformed_ending, repeated_calls, truncated; or paths of
    functions keep(problem, trajectory) -> bool.
    """
    max_staleness: int = Field(0, ge=0)
    """S: engines go on while the actor trains, which at weight version v trains tokens of version v - S or newer. 0: every
    step waits for its rollouts. S > 0 needs engines on other slots than the actor (docs/asynchronous.md).
    """
    loss_agg_func: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "released-verl", "released-rlinf"] = (
        "token-mean"
    )
    """token-mean: over the whole mini-batch (DAPO; the paper's equation has one problem's group); the released ones as
    `algorithm.loss.aggregate` describes them.
    """
    recompute_logprobs: bool = False
    """Old log-probs from the actor instead of the engine; works with down-sampling on."""
    clip_ratio_low: float = Field(0.2, gt=0, lt=1)
    """The ratio of new and old probability is clipped to 1 - clip_ratio_low and 1 + clip_ratio_high (clip-higher)."""
    clip_ratio_high: float = Field(0.28, gt=0)
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: the loss of a negative-advantage token is at most clip_ratio_c * |A|; null turns it off."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the KL term to the policy that RL started from; GRPO-RoC trains without (0)."""
    kl_penalty_type: Literal["low_var_kl", "k3", "mse", "k2", "kl", "k1", "abs"] = "low_var_kl"
    """Estimator of that term by its name in RLinf: low_var_kl = k3, mse = k2; kl = k1 and abs are refused."""
    kl_clamp: float | None = Field(None, gt=0)
    """Largest value of low_var_kl of a token; the public codes have 10. null: none."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the mean token entropy, subtracted from the loss."""
    entropy_bonus_tokens: int | None = Field(None, ge=1)
    """The bonus is for the first so many generated tokens behind each tool response alone (after TAO-RL). null: for all."""
    importance_sampling_fix: bool = False
    """Truncated importance sampling between engine and actor; needs recompute_logprobs."""
    importance_sampling_clip: float = Field(2.0, gt=0)
    decoupled_loss: bool = False
    """Decoupled PPO (arXiv 2505.24298): the ratio is clipped against the policy before the update (the proximal one), and each
    token is weighted by proximal / engine. Needs recompute_logprobs.
    """
    decoupled_weight_cap: float | None = Field(None, ge=1)
    """Tokens whose weight proximal / engine is larger are left out of the loss and of its denominator."""
    mis_sequence: Band | None = None
    """Masked importance sampling: sequences whose product of ratios is outside are left out, e.g. [0.5, 2]."""
    mis_geometric: Band | None = None
    """The same for the geometric mean of the ratios, e.g. [0.99, 1.01]."""
    icepop: Band | None = None
    """IcePop's band: tokens whose ratio is outside are left out, e.g. [0.5, 5]. Its weight is importance_sampling_fix."""
    down_sampling: DownSamplingSettings
    refill: RefillSettings = RefillSettings()
    sampling_params: SamplingParams
